"""`run --keep-experts FILE`: which experts a job keeps, read from a list, from REAP's report, or chosen by scores.

    list            {"experts": {"1": [0, 5, ..], ..}, "of": 384, "chosen_by": "..", "left_out": ..}; see
                    records/pruning.py
    REAP's report   {"model.layers.1.mlp": [0, 5, ..], ..}: report_path of llm-compressor's REAPPruningModifier
    scores          {"scores": {"1": [0.5, 0.25, ..], ..}, "of": 384, "chosen_by": ".."}, one number per expert
    statistics      the file of `k2convert calibrate`, which has REAP's saliency

Layers are those of the model, experts are numbered as in the source. `of`, the number of experts per layer,
`chosen_by`, one phrase, and `left_out` may be left out. With scores and statistics, the recipe's `experts` is how many
to keep.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import Field

from k2convert.checkpoint.files import parse_json_object, read_small_file
from k2convert.checkpoint.folders import temporary_folder
from k2convert.errors import CalibrationError, MalformedFileError, PlanError, SourceReadError, remedy
from k2convert.hub.client import Hub
from k2convert.hub.ranges import RemoteShards, ranges_of
from k2convert.models import detect_family
from k2convert.models.names import Architecture
from k2convert.plan.pruning import KeptExperts, check_kept, choose_experts
from k2convert.plan.recipe import Recipe
from k2convert.records.document import Count, LayerNumber, parse
from k2convert.records.fingerprint import Source
from k2convert.records.pruning import LeftOut, Phrase, PruningRecord, left_out

if TYPE_CHECKING:
    from k2convert.calibration.statistics import Statistics

REAP_REPORT: Final = "the REAP report of llm-compressor"
_REAP_MODULE: Final = re.compile(r"(?:\w+\.)*layers\.(0|[1-9][0-9]{0,5})\.\w+")
_MAX_NAMED_TEXTS: Final = 3
_REMEDY: Final = (
    'Pass {"experts": {"1": [0, 5], ...}}, a REAP report of llm-compressor, or scores; '
    "`k2convert guide prune` shows the forms."
)
_OF_THIS_MODEL: Final = "Use a file made for this model."

_PerExpert = dict[int, tuple[float, ...]]
Score = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class _List:
    experts: dict[LayerNumber, tuple[int, ...]]
    num_source_experts: Annotated[Count | None, Field(alias="of")] = None
    chosen_by: Phrase | None = None
    left_out: dict[LayerNumber, LeftOut] | None = None


@dataclass(frozen=True, slots=True)
class _Scores:
    scores: dict[LayerNumber, tuple[Score, ...]]
    num_source_experts: Annotated[Count | None, Field(alias="of")] = None
    chosen_by: Phrase | None = None


def prune_source(source: Source, recipe: Recipe, *, hub: Hub) -> Source:
    """Return the source with the experts that the recipe keeps; raises PlanError, CalibrationError."""
    assert recipe.keep_experts is not None
    path = Path(recipe.keep_experts)
    count = recipe.experts
    checkpoint = source.checkpoint
    family = detect_family(checkpoint)
    architecture = family.read_architecture(checkpoint.config, str(checkpoint.folder))
    if count is not None and count > architecture.num_experts:
        raise PlanError(f"experts {count}: the model has {architecture.num_experts} experts per layer. Keep fewer.")
    weights: _PerExpert = {}
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "no such file"
        raise PlanError(f"{path}: {kind}. Pass a file that says which experts to keep.")
    try:
        with path.open("rb") as file:
            begin = file.read(8)
    except OSError as error:
        raise SourceReadError(f"{path}: cannot be read ({error.strerror}). Check permissions and disk.") from None
    # Safetensors begin with the length of the header. As such a number, text is enormous.
    if len(begin) == 8 and int.from_bytes(begin, "little") <= path.stat().st_size:
        if family.not_computed:
            raise PlanError(f"{path}: statistics, but {family.title} has none: {family.not_computed}. {_REMEDY}")
        from k2convert.calibration.channels import check_statistics_source
        from k2convert.calibration.statistics import open_statistics

        found = open_statistics(path).keep_experts(None)
        check_statistics_source(found, checkpoint)
        _check_norms(found, source, hub)
        scores, weights = _per_expert(found, architecture)
        names = [name if name.isprintable() and len(name) <= 40 else "a text" for name, _ in found.texts]
        more = ""
        if len(names) > _MAX_NAMED_TEXTS:
            more = f" and {len(names) - _MAX_NAMED_TEXTS} more"
        form: _List | _Scores = _Scores(
            scores, None, f"REAP saliency on {found.tokens:,} tokens of {', '.join(names[:_MAX_NAMED_TEXTS])}{more}"
        )
    else:
        form = _parse(path)
    return source.pruned(_chosen(form, weights, count, path, architecture, checkpoint.config))


def _parse(path: Path) -> _List | _Scores:
    """Return what a JSON file lists or scores, not yet checked against the model; raises CheckpointError."""
    with remedy(_REMEDY):
        try:
            text = read_small_file(path).decode()
        except UnicodeDecodeError:
            raise MalformedFileError(f"{path}: not UTF-8 text.") from None
        document = parse_json_object(text, where=str(path))
        if not document or not all(_REAP_MODULE.fullmatch(name) for name in document):
            return parse(_Scores if "scores" in document else _List, text, where=str(path))
        modules = parse(dict[str, tuple[Count, ...]], text, where=str(path))
        layers = {int(module.rsplit(".", 2)[1]): experts for module, experts in modules.items()}
        if len(layers) < len(modules):
            raise MalformedFileError(f"{path}: has a layer twice.")
        return _List(layers, None, REAP_REPORT)


def _chosen(
    form: _List | _Scores,
    weights: Mapping[int, Sequence[float]],
    count: int | None,
    path: Path,
    architecture: Architecture,
    config: Mapping[str, Any],
) -> PruningRecord:
    total = architecture.num_experts
    if form.num_source_experts not in (None, total):
        raise PlanError(
            f"{path}: is for a model with {form.num_source_experts} experts per layer, but this model has {total}. "
            f"{_OF_THIS_MODEL}"
        )
    if isinstance(form, _List):
        if count is not None:
            raise PlanError(f"{path}: lists the experts to keep, so there is nothing to choose. Leave out `experts`.")
        kept = KeptExperts({layer: tuple(sorted(experts)) for layer, experts in sorted(form.experts.items())})
        phrase = form.chosen_by
        shares = form.left_out
    else:
        for layer, values in form.scores.items():
            if len(values) != total:
                raise PlanError(
                    f"{path}: layer {layer} has {len(values)} scores, but the model has {total} experts per layer. "
                    f"{_OF_THIS_MODEL}"
                )
        if count is None:
            raise PlanError(f"{path}: has scores, but does not say how many experts to keep. Add --set experts=N.")
        kept = choose_experts(dict(sorted(form.scores.items())), count, config)
        phrase = form.chosen_by or "unnamed scores"
        shares = left_out(kept, form.scores, weights)
    try:
        check_kept(kept, architecture, config)
        return PruningRecord(dict(kept.layers), total, phrase, shares)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    except ValueError as error:
        raise PlanError(f"{path}: {error}. Leave out 'left_out'.") from None


def _per_expert(found: "Statistics", architecture: Architecture) -> tuple[_PerExpert, _PerExpert]:
    scores: _PerExpert = {}
    weights: _PerExpert = {}
    for number in architecture.moe_layers:
        layer = found.layer(number)
        scores[number] = tuple(layer.saliency.tolist())
        weights[number] = tuple(layer.router_weight.tolist())
        if layer.num_experts != architecture.num_experts:
            raise CalibrationError(
                f"{found.path}: layer {number} has {layer.num_experts} experts, but the source has "
                f"{architecture.num_experts}. Make statistics of this source with `k2convert calibrate`."
            )
    return scores, weights


def _check_norms(found: "Statistics", source: Source, hub: Hub) -> None:
    from k2convert.calibration.channels import check_norms, norm_tensors

    if source.remote is None:
        check_norms(found, source.checkpoint, folder=source.checkpoint.folder)
        return
    ranges = ranges_of(norm_tensors(found, source.checkpoint).values())
    with temporary_folder() as temporary:
        RemoteShards(hub, source.remote, temporary).bring(ranges)
        check_norms(found, source.checkpoint, folder=temporary)
