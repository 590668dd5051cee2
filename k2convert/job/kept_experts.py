"""`run --keep-experts FILE`: which experts a job keeps, read from a list, from REAP's report, or chosen by scores.

    list            {"experts": {"1": [0, 5, ..], ..}, "of": 384, "chosen_by": ".."}; see records/pruning.py
    REAP's report   {"model.layers.1.mlp": [0, 5, ..], ..}: report_path of llm-compressor's REAPPruningModifier
    scores          {"scores": {"1": [0.5, 0.25, ..], ..}, "of": 384, "chosen_by": ".."}, one number an expert
    statistics      the file of `k2convert calibrate`, which has REAP's saliency

Layers are those of the model, experts are numbered as in the source. `of`, how many experts a layer of the model has,
and `chosen_by`, one phrase, may be left out. With scores and statistics, --experts says how many to keep.
"""

import math
import re
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from k2convert.calibrate.statistics import Statistics, open_statistics
from k2convert.checkpoint.files import MAX_SMALL_FILE_BYTES, parse_json_object
from k2convert.errors import CalibrationError, PlanError, SourceReadError, quoted, remedy, shortened
from k2convert.hub.client import Hub
from k2convert.job.calibration import check_norms, check_statistics_source, norm_tensors
from k2convert.job.places import Source
from k2convert.models import detect_family
from k2convert.models.names import Architecture
from k2convert.plan.pruning import KeptExperts, check_kept, choose_experts
from k2convert.plan.recipe import Recipe
from k2convert.records.pruning import PruningRecord, check_phrase, parse_layers
from k2convert.validate.remote import Ranges, RemoteShards

REAP_REPORT: Final = "the REAP report of llm-compressor"
_REAP_MODULE: Final = re.compile(r"(?:\w+\.)*layers\.(0|[1-9][0-9]{0,5})\.\w+")
_OWN_KEYS: Final = ("experts", "scores", "of", "chosen_by")
_MAX_NAMED_TEXTS: Final = 3
_REMEDY: Final = (
    'Pass {"experts": {"1": [0, 5], ...}}, a REAP report of llm-compressor, or scores: the README has the forms.'
)


def prune_source(source: Source, recipe: Recipe, *, hub: Hub) -> Source:
    """Return the source with the experts that the recipe keeps; as it is, if the recipe keeps all.

    Raises PlanError or CalibrationError naming file, layer and remedy if the file cannot be used for this model.
    """
    if recipe.keep_experts is None:
        return source
    return source.pruned(_read(Path(recipe.keep_experts), recipe.experts, source, hub))


def _read(path: Path, count: int | None, source: Source, hub: Hub) -> PruningRecord:
    checkpoint = source.checkpoint
    architecture = detect_family(checkpoint).read_architecture(checkpoint.config, str(checkpoint.folder))
    if count is not None and count > architecture.num_experts:
        raise PlanError(f"--experts {count}: the model has {architecture.num_experts} experts a layer. Keep fewer.")
    raw = _contents(path)
    if raw is None:
        found = open_statistics(path)
        check_statistics_source(found, checkpoint)
        _check_norms(found, source, hub)
        scores, phrase = _saliency(found, architecture), _statistics_phrase(found)
        kept = choose_experts(scores, _needed(count, path), checkpoint.config)
    else:
        with remedy(_REMEDY):
            document = parse_json_object(raw, where=str(path))
        try:
            kept, phrase = _parse(document, count, path, architecture, checkpoint.config)
        except ValueError as error:
            raise PlanError(f"{path}: {error}. {_REMEDY}") from None
    with _naming(path):
        check_kept(kept, architecture, checkpoint.config)
    return PruningRecord(kept, architecture.num_experts, phrase)


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
) -> tuple[KeptExperts, str | None]:
    """Return the experts that a JSON file keeps, and whose scores chose them; ValueError, PlanError."""
    if document and all(_REAP_MODULE.fullmatch(name) for name in document):
        return _listed(_reap_layers(document), count, path), REAP_REPORT
    if unknown := sorted(document.keys() - set(_OWN_KEYS)):
        raise ValueError(f"unknown key {quoted(unknown[0])}; known keys: {', '.join(_OWN_KEYS)}")
    if ("experts" in document) == ("scores" in document):
        raise ValueError("has to have one of the keys 'experts' and 'scores'")
    phrase = check_phrase(document.get("chosen_by"))
    if "of" in document and (type(document["of"]) is not int or document["of"] != architecture.num_experts):
        raise PlanError(
            f"{path}: is for a model with {quoted(document['of'])} experts a layer, but this model has "
            f"{architecture.num_experts}. Use a list made for this model."
        )
    if "experts" in document:
        return _listed(parse_layers(document["experts"], name="experts"), count, path), phrase
    scores = parse_layers(document["scores"], name="scores")
    for layer, values in scores.items():
        if wrong := [value for value in values if not _is_score(value)]:
            raise ValueError(f"layer {layer}: the score {quoted(wrong[0])} is not a finite number")
        if len(values) != architecture.num_experts:
            raise PlanError(
                f"{path}: layer {layer} has {len(values)} scores, but the model has {architecture.num_experts} experts "
                "a layer. Use scores of this model."
            )
    return choose_experts(scores, _needed(count, path), config), phrase or "unnamed scores"


def _is_score(value: object) -> bool:
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < 1 << 53)


def _listed(layers: Mapping[int, list[Any]], count: int | None, path: Path) -> KeptExperts:
    if count is not None:
        raise PlanError(f"{path}: lists the experts to keep, so there is nothing to choose. Leave out --experts.")
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
        raise PlanError(f"{path}: has scores, so it has to be said how many experts to keep. Add --experts N.")
    return count


def _saliency(found: Statistics, architecture: Architecture) -> dict[int, list[float]]:
    scores: dict[int, list[float]] = {}
    for number in architecture.moe_layers:
        scores[number] = found.layer(number).saliency.tolist()
        if len(scores[number]) != architecture.num_experts:
            raise CalibrationError(
                f"{found.path}: layer {number} has {len(scores[number])} experts, but the source has "
                f"{architecture.num_experts}. Make statistics of this source with `k2convert calibrate`."
            )
    return scores


def _statistics_phrase(found: Statistics) -> str:
    names = [name if name.isprintable() and len(name) <= 40 else "a text" for name, _ in found.texts]
    more = f" and {len(names) - _MAX_NAMED_TEXTS} more" if len(names) > _MAX_NAMED_TEXTS else ""
    return f"REAP saliency on {found.tokens:,} tokens of {', '.join(names[:_MAX_NAMED_TEXTS])}{more}"


def _check_norms(found: Statistics, source: Source, hub: Hub) -> None:
    """Compare the norms of a source with those of its statistics; fetches them from the Hub."""
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
def _naming(path: Path) -> Generator[None]:
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
