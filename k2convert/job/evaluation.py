"""Open what an evaluation needs, and plan it: for `k2convert evaluate` and the function of the package."""

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k2convert.checkpoint.files import file_digest
from k2convert.checkpoint.names import CONFIG_NAME, EVALUATION_NAME, WORK_FOLDER, WORK_SUFFIX, model_name
from k2convert.choices import ComputedKvCache, RequestedActivations
from k2convert.errors import CalibrationError, CheckpointError, DestinationError, require_extra
from k2convert.evaluation.checkpoints import (
    EvaluatedCheckpoint,
    check_comparable,
    check_computable,
    check_text,
    head_names,
    modes_of,
)
from k2convert.evaluation.plan import WORK_NAME, EvaluationPlan, Output
from k2convert.forward.layer_pass import LayerPass, PassText
from k2convert.hub.client import SCHEME, Hub
from k2convert.hub.ranges import Ranges, RemoteShards, ranges_of
from k2convert.job.locations import check_output_path, commit_of, open_checkpoint_at
from k2convert.job.opening import TextFiles, read_text
from k2convert.job.resources import allowed_disk, device_name
from k2convert.models import read_architecture
from k2convert.plan.recipe import TextUse
from k2convert.records.document import JsonObject
from k2convert.records.evaluation import MAX_ROWS, EvaluatedModel
from k2convert.records.events import SILENT
from k2convert.records.fingerprint import check_version, source_digest
from k2convert.records.ledger import find_ledger, weights_digest

if TYPE_CHECKING:
    from k2convert.forward.layer_pass import LayerPart
    from k2convert.forward.work import WorkFolder

ARITHMETIC: Final = 1  # to be raised when an evaluation makes other figures of the same input
_REVISION: Final = "revision of {}"


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """Options by which models are computed: the rounding of activations and KV cache; `out` is the file to write."""

    activations: RequestedActivations | None = None
    kv_cache: ComputedKvCache | None = None
    out: Path | None = None
    any_text: bool = False
    """Set if the text may be one that a checkpoint was calibrated on."""
    max_disk: int | None = None


@contextmanager
def open_evaluation(
    reference: str,
    checkpoints: Sequence[str],
    text: TextFiles,
    use: TextUse,
    options: EvaluationOptions,
    *,
    hub: Hub,
) -> Generator[EvaluationPlan]:
    """Open reference and checkpoints of an evaluation and plan it; they stay open for the block.

    Writes nothing. Raises any K2ConvertError.
    """
    require_extra("calibrate", purpose="evaluate")
    from k2convert.forward.decoder import check_config

    addresses = (reference, *dict.fromkeys(checkpoints))
    outputs = _outputs(addresses, options.out)
    for path in (output.path for output in outputs):
        check_output_path(path, source=None if reference.startswith(SCHEME) else Path(reference))
        if any(path.exists() and file.exists() and path.samefile(file) for file in text.files):
            raise DestinationError(f"{path}: is the text, which is not written to. Name a different file with --out.")
    work_folder = outputs[0].work_folder
    begun = _work(work_folder, 1).job()
    if begun is not None:
        check_version(begun.version, work_folder)
    pinned: Mapping[str, object] = {} if begun is None else begun.identity
    with ExitStack() as stack:
        names = {address: address if address.startswith(SCHEME) else model_name(Path(address)) for address in addresses}
        counts = Counter(names.values())  # two folders may have the same name: then their paths tell them apart
        evaluated: list[EvaluatedCheckpoint] = []
        for address in reversed(addresses):  # the ledgers of results name the commit of the reference
            commits = [
                pinned.get(_REVISION.format(address)),
                *(commit_of(checkpoint.ledger, address) for checkpoint in evaluated),
            ]
            revision = next((str(commit) for commit in commits if commit is not None), None)
            recipes = [
                checkpoint.ledger.recipe
                for checkpoint in evaluated
                if checkpoint.ledger is not None and commit_of(checkpoint.ledger, address)
            ]
            recipe = next(iter(recipes), None)
            opened = stack.enter_context(open_checkpoint_at(address, hub=hub, pinned=revision, recipe=recipe))
            if revision not in (None, opened.revision) and "@" in address:
                hub.warn(f"{address}: is not at the commit {str(revision)[:7]}, which a result was converted from")
            name = names[address] if counts[names[address]] == 1 else address
            ledger = None
            with suppress(CheckpointError):  # without one that can be read, it is anybody's checkpoint
                ledger = find_ledger(opened.checkpoint.folder)
            evaluated.insert(0, EvaluatedCheckpoint(name, address, opened, ledger))
        for checkpoint in evaluated:
            check_computable(checkpoint)
            check_comparable(checkpoint, evaluated[0])
            check_config(checkpoint.checkpoint)
        read = read_text(text, use, evaluated[0].source, hub)
        _check_windows(read)
        if not options.any_text:
            check_text(read.windows.texts, evaluated[1:])
        yield _plan(tuple(evaluated), read, options, outputs, hub=hub)


def _check_windows(text: PassText) -> None:
    """Refuse windows in which nothing is predicted (CalibrationError)."""
    if text.windows.ids.shape[1] < 2:
        names = ", ".join(name for name, _ in text.windows.texts)
        raise CalibrationError(f"{names}: a window of one token predicts nothing. Use a longer text.")


def _outputs(addresses: Sequence[str], out: Path | None) -> tuple[Output, ...]:
    """Return the files to write, of checkpoints whose first one is the reference.

    Without --out these are RESULT/evaluation.json of every checkpoint in a folder but the reference.
    """
    if out is not None:
        return (Output(out, None),)
    ours = Path(addresses[0]).resolve()
    local = {
        Path(address): number
        for number, address in enumerate(addresses)
        if not address.startswith(SCHEME) and Path(address).resolve() != ours
    }
    if not local:
        raise DestinationError(
            "no checkpoint is in a folder of its own that the evaluation can be written to. Name a file with --out."
        )
    for folder in local:
        if (folder / CONFIG_NAME).is_symlink():
            raise DestinationError(f"{folder}: is made of links, so nothing is written to it. Name a file with --out.")
    return tuple(Output(folder / EVALUATION_NAME, number) for folder, number in local.items())


def evaluation_works(path: Path) -> "tuple[WorkFolder, WorkFolder]":
    """Return the work folders of an evaluation whose rows go into a file, and of one that is kept in a result."""
    from k2convert.forward.work import WorkFolder

    folders = path.with_name(path.name + WORK_SUFFIX), path / WORK_FOLDER / WORK_NAME
    of_file, of_result = (WorkFolder(folder, purpose="evaluation") for folder in folders)
    return of_file, of_result


def _work(folder: Path, models: int, residual_block: int = 0) -> "WorkFolder":
    from k2convert.evaluation.streamed import stream_of
    from k2convert.forward.work import WorkFolder

    streams = tuple(map(stream_of, range(models)))
    return WorkFolder(folder, streams=streams, purpose="evaluation", residual_block=residual_block)


def _plan(
    checkpoints: tuple[EvaluatedCheckpoint, ...],
    text: PassText,
    options: EvaluationOptions,
    outputs: tuple[Output, ...],
    *,
    hub: Hub,
) -> EvaluationPlan:
    """Plan an evaluation of opened checkpoints, the reference first.

    Writes nothing; raises DiskFullError if less disk is there than the options allow.
    """
    from k2convert.evaluation.streamed import pass_models, states_bytes
    from k2convert.forward.layer_pass import LayerShards
    from k2convert.forward.work import PassJob

    by_checkpoint = [
        _models(checkpoint, options, is_reference=checkpoint is checkpoints[0]) for checkpoint in checkpoints
    ]
    models = tuple(model for own in by_checkpoint for model in own)
    if len(models) > MAX_ROWS:
        raise DestinationError(f"{len(models)} models: an evaluation has at most {MAX_ROWS}. Evaluate fewer at a time.")
    inputs = tuple(checkpoint.inputs() for checkpoint in checkpoints)
    architecture = read_architecture(checkpoints[0].checkpoint)
    work = _work(outputs[0].work_folder, len(models), architecture.residual_block)
    uses_hub = any(checkpoint.source.remote is not None for checkpoint in checkpoints)
    return EvaluationPlan(
        layer_pass=LayerPass(
            text=text,
            num_layers=architecture.num_layers,
            hidden_size=architecture.hidden_size,
            work=work,
            job=PassJob(_identity(checkpoints, by_checkpoint, inputs, text, device_name(text.devices)), text.chunk, {}),
            shards=LayerShards(_parts(checkpoints, work, hub), work.downloads, 0, SILENT),
            models=pass_models(by_checkpoint, [checkpoint.address for checkpoint in checkpoints]),
            disk_bytes=states_bytes(text.windows.ids.size, architecture, models=len(models)),
            disk_allowed=allowed_disk(work.folder, uses_hub=uses_hub, max_disk=options.max_disk),
        ),
        checkpoints=checkpoints,
        models=models,
        inputs=inputs,
        outputs=outputs,
    )


def _models(checkpoint: EvaluatedCheckpoint, options: EvaluationOptions, *, is_reference: bool) -> list[EvaluatedModel]:
    """Return the models of a checkpoint: in each of its modes; the reference as its config declares it."""
    weights = weights_digest(checkpoint.checkpoint, checkpoint.ledger)
    config = file_digest(checkpoint.checkpoint.folder / CONFIG_NAME)
    if is_reference:
        return [EvaluatedModel(checkpoint.name, weights, modes_of(checkpoint.checkpoint, None)[0], config=config)]
    modes = modes_of(checkpoint.checkpoint, options.activations)
    return [EvaluatedModel(checkpoint.name, weights, mode, options.kv_cache, config) for mode in modes]


def _identity(
    checkpoints: Sequence[EvaluatedCheckpoint],
    models: Sequence[Sequence[EvaluatedModel]],
    inputs: Sequence[Mapping[str, str]],
    text: PassText,
    device: str,
) -> JsonObject:
    """Return everything that the figures depend on, field by field, as a refused resume names it."""
    modes = [
        f"{checkpoint.address} {model.activations or ''}".strip()
        for checkpoint, own in zip(checkpoints, models, strict=True)
        for model in own
    ]
    identity: JsonObject = {
        "arithmetic": ARITHMETIC,
        "models": ", ".join(modes),
        "kv_cache": models[-1][-1].kv_cache,
        "layers": read_architecture(checkpoints[0].checkpoint).num_layers,
        **text.identity(device),
    }
    for checkpoint, files in zip(checkpoints, inputs, strict=True):
        remote = checkpoint.source.remote
        identity[_REVISION.format(checkpoint.address)] = None if remote is None else remote.commit
        identity[f"headers of {checkpoint.address}"] = source_digest(checkpoint.checkpoint)
        identity |= {f"{checkpoint.name}/{name}": found_identity for name, found_identity in files.items()}
    return identity


def _parts(checkpoints: Sequence[EvaluatedCheckpoint], work: "WorkFolder", hub: Hub) -> "list[LayerPart]":
    """Return what is read, in order: each layer of every checkpoint, then the head of every checkpoint."""
    from k2convert.forward.layer_pass import LayerPart, layer_ranges

    num_layers = read_architecture(checkpoints[0].checkpoint).num_layers
    ranges: list[Sequence[Ranges]] = []
    for checkpoint in checkpoints:
        head = ranges_of(checkpoint.checkpoint.tensors[name] for name in head_names(checkpoint.checkpoint))
        ranges.append((*layer_ranges(checkpoint.checkpoint, num_layers), head))
    remotes = [
        None if checkpoint.source.remote is None else RemoteShards(hub, checkpoint.source.remote, work.downloads)
        for checkpoint in checkpoints
    ]
    return [
        LayerPart(checkpoint.checkpoint, remote, of[number])
        for number in range(num_layers + 1)
        for checkpoint, remote, of in zip(checkpoints, remotes, ranges, strict=True)
    ]
