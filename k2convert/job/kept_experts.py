"""`run --keep-experts FILE`: which experts a job keeps, read from a list, from REAP's report, or chosen by scores.

    list            {"experts": {"1": [0, 5, ..], ..}, "of": 384, "chosen_by": "..", "left_out": ..}; see
                    records/pruning.py
    REAP's report   {"model.layers.1.mlp": [0, 5, ..], ..}: report_path of llm-compressor's REAPPruningModifier
    scores          {"scores": {"1": [0.5, 0.25, ..], ..}, "of": 384, "chosen_by": ".."}, one number per expert
    statistics      the file of `k2convert calibrate`, which has REAP's saliency

Layers are those of the model, experts are numbered as in the source. `of`, how many experts a layer of the model has,
`chosen_by`, one phrase, and `left_out` may be left out. With scores and statistics, the recipe's `experts` is how many
to keep.
"""

import math
import re
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from k2convert.checkpoint.files import MAX_SMALL_FILE_BYTES, parse_json_object
from k2convert.errors import CalibrationError, PlanError, SourceReadError, quoted, remedy, shortened
from k2convert.hub.client import Hub
from k2convert.hub.ranges import Ranges, RemoteShards
from k2convert.job.locations import Source
from k2convert.models import detect_family
from k2convert.models.names import Architecture
from k2convert.plan.pruning import KeptExperts, check_kept, choose_experts
from k2convert.plan.recipe import Recipe
from k2convert.records.pruning import PruningRecord, check_phrase, left_out, parse_layers, parse_left_out

if TYPE_CHECKING:
    from k2convert.calibrate.statistics import Statistics

REAP_REPORT: Final = "the REAP report of llm-compressor"
_REAP_MODULE: Final = re.compile(r"(?:\w+\.)*layers\.(0|[1-9][0-9]{0,5})\.\w+")
_OWN_KEYS: Final = ("experts", "scores", "of", "chosen_by", "left_out")
_MAX_NAMED_TEXTS: Final = 3
_REMEDY: Final = (
    'Pass {"experts": {"1": [0, 5], ...}}, a REAP report of llm-compressor, or scores; '
    "`k2convert guide prune` shows the forms."
)
_OF_THIS_MODEL: Final = "Use a file made for this model."


def prune_source(source: Source, recipe: Recipe, *, hub: Hub) -> Source:
    """Return the source with only the experts that the recipe's `keep_experts` keeps.

    Raises PlanError or CalibrationError naming file, layer and remedy if the file cannot be used for this model.
    """
    assert recipe.keep_experts is not None
    return source.pruned(_read(Path(recipe.keep_experts), recipe.experts, source, hub))


def _read(path: Path, count: int | None, source: Source, hub: Hub) -> PruningRecord:
    checkpoint = source.checkpoint
    architecture = detect_family(checkpoint).read_architecture(checkpoint.config, str(checkpoint.folder))
    if count is not None and count > architecture.num_experts:
        raise PlanError(f"experts {count}: the model has {architecture.num_experts} experts per layer. Keep fewer.")
    raw = _contents(path)
    if raw is None:
        from k2convert.calibrate.fitting import check_statistics_source
        from k2convert.calibrate.statistics import open_statistics

        found = open_statistics(path)
        check_statistics_source(found, checkpoint)
        _check_norms(found, source, hub)
        scores, weights = _per_expert(found, architecture)
        kept = choose_experts(scores, _needed(count, path), checkpoint.config)
        shares = left_out(kept, scores, weights)
        record = PruningRecord(kept, architecture.num_experts, _statistics_phrase(found), shares)
    else:
        with remedy(_REMEDY):
            document = parse_json_object(raw, where=str(path))
        record = _parse(document, count, path, architecture, checkpoint.config)
    with _refusing(path):
        check_kept(record.kept, architecture, checkpoint.config)
    return record


def _contents(path: Path) -> str | None:
    """Return the text of a file, None if it is safetensors; raises PlanError, SourceReadError."""
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "no such file"
        raise PlanError(f"{path}: {kind}. Pass a file that says which experts to keep.")
    try:
        with path.open("rb") as file:
            raw = file.read(8)
            # Safetensors begins with the length of its header; text of eight bytes would be an enormous number.
            if len(raw) == 8 and int.from_bytes(raw, "little") <= path.stat().st_size:
                return None
            raw += file.read(MAX_SMALL_FILE_BYTES)
    except OSError as error:
        raise SourceReadError(f"{path}: cannot be read ({error.strerror}). Check permissions and disk.") from None
    if len(raw) > MAX_SMALL_FILE_BYTES:
        raise PlanError(f"{path}: larger than {MAX_SMALL_FILE_BYTES:,} bytes, which no such list is. {_REMEDY}")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise PlanError(f"{path}: not UTF-8 text. {_REMEDY}") from None


def _parse(
    document: Mapping[str, Any], count: int | None, path: Path, architecture: Architecture, config: Mapping[str, Any]
) -> PruningRecord:
    """Return the experts that a JSON file keeps, not yet checked against the model; raises PlanError."""
    total = architecture.num_experts
    if document and all(_REAP_MODULE.fullmatch(name) for name in document):
        with _refusing(path, "Pass the report as llm-compressor wrote it."):
            return PruningRecord(_listed(_reap_layers(document), count), total, REAP_REPORT)
    with _refusing(path, _REMEDY):
        if unknown := sorted(document.keys() - set(_OWN_KEYS)):
            raise ValueError(f"unknown key {quoted(unknown[0])}; known keys: {', '.join(_OWN_KEYS)}")
        if ("experts" in document) == ("scores" in document):
            raise ValueError("has to have one of the keys 'experts' and 'scores'")
        name = "experts" if "experts" in document else "scores"
        layers = parse_layers(document[name], name=name)
    with _refusing(path, "Shorten 'chosen_by', or leave it out."):
        phrase = check_phrase(document.get("chosen_by"))
    if "of" in document and (type(document["of"]) is not int or document["of"] != total):
        raise PlanError(
            f"{path}: is for a model with {quoted(document['of'])} experts per layer, but this model has {total}. "
            f"{_OF_THIS_MODEL}"
        )
    if name == "experts":
        with _refusing(path, "List each expert by its number in the source."):
            kept = _listed(layers, count)
        with _refusing(path, "Leave out 'left_out'."):
            return PruningRecord(kept, total, phrase, parse_left_out(document.get("left_out"), layers=kept.layers))
    with _refusing(path, "Give each expert one finite number."):
        _check_scores(layers)
    for layer, values in layers.items():
        if len(values) != total:
            raise PlanError(
                f"{path}: layer {layer} has {len(values)} scores, but the model has {total} experts per layer. "
                f"{_OF_THIS_MODEL}"
            )
    kept = choose_experts(layers, _needed(count, path), config)
    return PruningRecord(kept, total, phrase or "unnamed scores", left_out(kept, layers))


def _check_scores(layers: Mapping[int, list[Any]]) -> None:
    for layer, values in layers.items():
        if wrong := [value for value in values if not _is_score(value)]:
            raise ValueError(f"layer {layer}: the score {quoted(wrong[0])} is not a finite number")


def _is_score(value: object) -> bool:
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < 1 << 53)


def _listed(layers: Mapping[int, list[Any]], count: int | None) -> KeptExperts:
    if count is not None:
        raise PlanError("lists the experts to keep, so there is nothing to choose. Leave out `experts`.")
    for layer, experts in layers.items():
        if wrong := [expert for expert in experts if type(expert) is not int]:
            raise ValueError(f"layer {layer}: {quoted(wrong[0])} is not the number of an expert")
    return KeptExperts({layer: tuple(sorted(experts)) for layer, experts in layers.items()})


def _reap_layers(document: Mapping[str, Any]) -> dict[int, list[Any]]:
    """Return the lists of a report whose keys are modules of MoE blocks, by layer; raises ValueError."""
    found: dict[str, Any] = {}
    for module, experts in document.items():
        layer = module.rsplit(".", 2)[1]
        if layer in found:
            raise ValueError(f"has layer {layer} twice, the second time as {shortened(module)}")
        found[layer] = experts
    return parse_layers(found, name="the report")


def _needed(count: int | None, path: Path) -> int:
    if count is None:
        raise PlanError(f"{path}: has scores, but does not say how many experts to keep. Add --set experts=N.")
    return count


def _per_expert(
    found: "Statistics", architecture: Architecture
) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
    """Return the saliency and the router's weight of every expert, by layer."""
    scores: dict[int, list[float]] = {}
    weights: dict[int, list[float]] = {}
    for number in architecture.moe_layers:
        layer = found.layer(number)
        scores[number], weights[number] = layer.saliency.tolist(), layer.router_weight.tolist()
        if layer.num_experts != architecture.num_experts:
            raise CalibrationError(
                f"{found.path}: layer {number} has {layer.num_experts} experts, but the source has "
                f"{architecture.num_experts}. Make statistics of this source with `k2convert calibrate`."
            )
    return scores, weights


def _statistics_phrase(found: "Statistics") -> str:
    names = [name if name.isprintable() and len(name) <= 40 else "a text" for name, _ in found.texts]
    more = f" and {len(names) - _MAX_NAMED_TEXTS} more" if len(names) > _MAX_NAMED_TEXTS else ""
    return f"REAP saliency on {found.tokens:,} tokens of {', '.join(names[:_MAX_NAMED_TEXTS])}{more}"


def _check_norms(found: "Statistics", source: Source, hub: Hub) -> None:
    """Compare the norms of a source with those of its statistics; fetches them from the Hub."""
    from k2convert.calibrate.fitting import check_norms, norm_tensors

    if source.remote is None:
        check_norms(found, source.checkpoint, folder=source.checkpoint.folder)
        return
    ranges: Ranges = {}
    for tensor in norm_tensors(found, source.checkpoint).values():
        ranges.setdefault(tensor.shard, set()).add((tensor.begin, tensor.end))
    with tempfile.TemporaryDirectory(prefix="k2convert-") as temporary:
        RemoteShards(hub, source.remote, Path(temporary)).bring(ranges)
        check_norms(found, source.checkpoint, folder=Path(temporary))


@contextmanager
def _refusing(path: Path, then: str = "") -> Generator[None]:
    """Name the file in a PlanError, which has its remedy; a ValueError becomes one that says what to do then."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    except ValueError as error:
        raise PlanError(f"{path}: {error}. {then}") from None
