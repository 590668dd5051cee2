"""The verbs `validate` and `report`: measure a finished folder, show the findings, write the report."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k2convert.calibrate.statistics import Statistics
from k2convert.calibrate.text import Windows, read_windows
from k2convert.checkpoint.files import read_json_file
from k2convert.checkpoint.header import ShardHeader, read_header
from k2convert.checkpoint.index import Checkpoint, open_checkpoint
from k2convert.cli import console
from k2convert.cli.progress import Display, Waiting
from k2convert.cli.serving import print_serve
from k2convert.cli.validation_view import show_validation
from k2convert.errors import CheckpointError, InvalidCheckpointError, K2ConvertError, remedy, require_extra
from k2convert.fit.weights import Tensor
from k2convert.hub.client import SCHEME, Hub, parse_repo
from k2convert.hub.ranges import RemoteShards
from k2convert.hub.source import read_headers
from k2convert.job.places import open_result, open_source
from k2convert.job.statistics_file import open_named_statistics
from k2convert.models import vocabulary_size
from k2convert.models.config import max_positions
from k2convert.models.projections import SOURCE_REMEDY
from k2convert.records.events import Extent
from k2convert.records.journal import Journal
from k2convert.records.ledger import find_ledger
from k2convert.records.publication import check_shards_are_here
from k2convert.report import ReportFiles, write_report
from k2convert.report.content import figures_document
from k2convert.report.figures import can_be_validated, check_folder
from k2convert.validate.contract.source_view import view_source
from k2convert.validate.remote import Shards, layer_bytes
from k2convert.validate.results import ValidationReport, folder_bytes, validation_document
from k2convert.validate.validation import LayersRequest, validate_checkpoint

if TYPE_CHECKING:
    from k2convert.validate.layers.cost import LayersCost

_MAX_NUMBERS: Final = 8  # layers that are listed one by one
TEXT_WINDOW: Final = 2048  # tokens that see each other, as in calibration
_VALIDATION_REMEDY: Final = "Write it again: `k2convert validate DEST --json > FILE`."


def validate(
    destination: str,
    *,
    source: str | None,
    layers: tuple[int, ...] | None,
    hidden_states: Path | None,
    text: tuple[Path, ...],
    tokens: int,
    reference: bool,
    statistics: str | None,
    against: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Validate and show the findings; raises InvalidCheckpointError if the validation fails.

    `layers` are the reference layers to compute: empty means all, None means none. Their hidden states are those of a
    file or of `text`, if one is given.
    """
    if reference:
        require_extra("reference", purpose="--reference")
    if text:
        require_extra("calibrate", purpose="--text")
    request = None if layers is None else LayersRequest(layers, hidden_states, tokens)
    with _open(destination, source, statistics, quiet=quiet) as opened:
        _check_operands(opened.source, layers=layers, hidden_states=hidden_states, against=against)
        if request is not None and opened.source is not None and text:
            request = replace(request, hidden_states=_read_text(text, opened.source, tokens=tokens))
        if opened.shards.result is None:
            check_shards_are_here(opened.folder)
        total = opened.bytes_to_read(layers) + (folder_bytes(against) if against is not None else 0)
        if opened.shards.is_remote and not quiet:
            console.print_event(
                f"checks {console.format_bytes(total)}, shard by shard; what comes from the Hub is dropped"
            )
        with _display(opened, request, total, quiet=quiet) as events:
            found = validate_checkpoint(
                folder=opened.folder,
                source=opened.source,
                reference=reference,
                against=against,
                layers=request,
                events=events,
                shards=opened.shards,
                statistics=opened.statistics,
            )
        _show_found(_named(found, destination), opened.folder, as_json=as_json)


def _read_text(files: tuple[Path, ...], source: Checkpoint, *, tokens: int) -> Windows:
    """Read the text for --layers with the source's tokenizer, and say what it has less than asked for."""
    found = read_windows(
        files,
        tokenizer=source.folder,
        vocab_size=vocabulary_size(source),
        tokens=tokens,
        window=min(TEXT_WINDOW, max_positions(source.config) or TEXT_WINDOW),
        seed=0,
    )
    for note in found.notes:
        console.print_note(note)
    return found


def _display(opened: "_Opened", request: LayersRequest | None, total: int, *, quiet: bool) -> Display:
    """Return the display of a validation. Says what the layers will take, if some are to be computed."""
    cost = None if request is None else _say_layers_cost(opened, request, quiet=quiet)
    extent = Extent({"check": (total, 0)}, num_experts=cost.num_experts if cost is not None else 0)
    display = Display("validate", extent, quiet=quiet)
    if cost is not None and cost.seconds is not None:
        display.tally.expected_seconds["layers"] = cost.seconds
    return display


def _show_found(found: ValidationReport, folder: Path, *, as_json: bool) -> None:
    """Show a validation; raises InvalidCheckpointError if it failed. `folder` has the result's config.json."""
    if as_json:
        console.print_json(validation_document(found))
    else:
        show_validation(found)
    if not found.passed:
        raise InvalidCheckpointError(f"{found.folder}: validation failed, see above. Do not publish or serve it.")
    if not as_json and found.contract.layout != "int4":
        ref = parse_repo(found.folder) if found.folder.startswith(SCHEME) else None
        if ref is None:
            print_serve(found.folder, folder=folder)
        else:
            print_serve(ref.repo, folder=folder, revision=ref.revision)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A result and its source, open: folders, and where shards that are not in them come from."""

    folder: Path
    source: Checkpoint | None
    shards: Shards
    statistics: Statistics | None

    @property
    def seen(self) -> Checkpoint | None:
        """The source with the experts that the result keeps, as far as its ledger can be read."""
        try:
            return view_source(self.source, find_ledger(self.folder)).checkpoint or self.source
        except K2ConvertError:  # the validation says what is wrong
            return self.source

    @property
    def num_bytes(self) -> int:
        """The tensor bytes of the result's shards."""
        return self.shards.result_bytes() if self.shards.result is not None else folder_bytes(self.folder)

    def bytes_to_read(self, layers: tuple[int, ...] | None) -> int:
        """The bytes of the result that a validation reads; of `layers`, about as many as the source's."""
        if not layers or self.source is None or not self.shards.is_remote:
            return self.num_bytes
        return layer_bytes(self.source, layers)


@contextmanager
def _open(destination: str, source: str | None, statistics: str | None, *, quiet: bool) -> Generator[_Opened]:
    """Open a result and, if given, its source and statistics; any may be on the Hub."""
    hub = Hub(notify=console.notifier(quiet=quiet))
    with (
        open_named_statistics(statistics, hub=hub) as calibrated,
        open_result(destination, hub=hub) as result,
        open_origin(source, hub=hub) as (origin, shards),
    ):
        if result.remote is not None:
            headers = read_headers(hub, result.remote, folder=result.folder)
            shards = replace(shards, result=RemoteShards(hub, result.remote, result.folder, headers))
        yield _Opened(result.folder, origin, shards, calibrated)


@contextmanager
def open_origin(text: str | None, *, hub: Hub) -> Generator[tuple[Checkpoint | None, Shards]]:
    """Open the source, and say where its shards are.

    A name without hf:// is a folder here, so that a mistyped one is not looked up on the Hub.
    """
    if text is None:
        yield None, Shards()
    elif text.startswith(SCHEME):
        with open_source(text, hub=hub) as source:
            assert source.remote is not None
            yield source.checkpoint, Shards(source=RemoteShards(hub, source.remote, source.checkpoint.folder))
    else:
        with remedy(SOURCE_REMEDY):
            checkpoint = open_checkpoint(Path(text))
        yield checkpoint, Shards()


def _named(found: ValidationReport, destination: str) -> ValidationReport:
    """Name what was validated as the user did, not by its temporary folder."""
    return replace(found, folder=destination, contract=replace(found.contract, folder=destination))


def _say_layers_cost(opened: "_Opened", request: LayersRequest, *, quiet: bool) -> "LayersCost | None":
    """Say what --layers will take, before anything is read; None if the result cannot be opened."""
    from k2convert.validate.layers.cost import layers_cost

    if (source := opened.seen) is None or opened.source is None:
        return None
    try:
        with Waiting("measures one expert", quiet=quiet):
            converted = None if opened.shards.is_remote else open_checkpoint(opened.folder)
            is_text = isinstance(request.hidden_states, Windows)
            cost = layers_cost(
                source=source, whole=opened.source, converted=converted, layers=request.layers, is_text=is_text
            )
    except K2ConvertError:  # the validation says what is wrong
        return None
    numbers = ",".join(map(str, cost.layers)) if len(cost.layers) <= _MAX_NUMBERS else f"{len(cost.layers)} layers"
    below = f" (and {cost.num_below} layers below, for the hidden states of the text)" if cost.num_below else ""
    text = (
        f"--layers {numbers}{below}: computes {cost.num_experts:,} experts on {request.tokens:,} tokens and reads "
        f"{console.format_bytes(cost.num_bytes)}"
    )
    if cost.seconds is not None:
        text += f", in about {console.format_seconds(cost.seconds)} (an estimate from one expert on this machine)"
    if not quiet:
        console.print_event(text)
    return cost


def _check_operands(
    source: Checkpoint | None, *, layers: tuple[int, ...] | None, hidden_states: Path | None, against: Path | None
) -> None:
    """Check now what is used after the pass over the shards, which may take hours; raises CheckpointError."""
    if layers is not None:
        require_extra("torch", purpose="--layers")
    if source is not None and layers:
        from k2convert.validate.layers.check import check_layers_exist

        check_layers_exist(source, layers)
    if hidden_states is not None:
        if not hidden_states.is_file():
            raise CheckpointError(f"{hidden_states}: no such file. Pass a file of hidden states.")
        with remedy("Capture the hidden states again, or leave out --hidden-states."):
            read_header(hidden_states)
    if against is not None:
        with remedy("Pass a complete NVFP4 checkpoint to --against."):
            open_checkpoint(against)


def report(
    destination: str,
    *,
    source: str | None,
    statistics: str | None,
    validation: Path | None,
    out: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write the report, with a validation from a file or of the folder, if the folder can be validated.

    The report on a repository goes into the current folder, unless `out` says otherwise.
    """
    with _open(destination, source, statistics, quiet=quiet) as opened:
        folder, is_remote = opened.folder, opened.shards.result is not None
        check_folder(folder)
        out = Path() if out is None and is_remote else out
        if validation is not None:
            with remedy(_VALIDATION_REMEDY):
                document = read_json_file(validation)
                files = write_report(folder=folder, out=out, validation=document, tensors=_tensors(opened))
        elif (found := _validate_for_report(opened, destination, source, quiet=quiet)) is not None:
            measured = found.weights.errors if found.weights is not None else None
            document = validation_document(found)
            files = write_report(
                folder=folder, out=out, validation=document, measured=measured, tensors=_tensors(opened)
            )
        else:
            files = write_report(folder=folder, out=out)
    is_servable = _show_report(files, as_json)
    if not as_json and is_servable and not is_remote:
        _print_next_of_report(folder, is_complete=files.report.is_complete)


def _tensors(opened: _Opened) -> list[Tensor] | None:
    """Return the tensors of the opened result's shards; None if a shard is not here or is damaged."""
    remote = opened.shards.result
    if remote is not None:
        headers = [header for header in remote.headers.values() if isinstance(header, ShardHeader)]
        is_whole = len(headers) == len(remote.headers)
        return [tensor for header in headers for tensor in header.tensors.values()] if is_whole else None
    try:
        return list(open_checkpoint(opened.folder).tensors.values())
    except K2ConvertError:  # the validation says what is wrong
        return None


def _print_next_of_report(destination: Path, *, is_complete: bool) -> None:
    """A result is published next; a conversion that is not finished, or whose shards are gone, says how it stands."""
    if is_complete and can_be_validated(destination) and find_ledger(destination) is not None:
        console.print_next(console.command("k2convert", "publish", destination, "--repo", "owner/name"))
    elif Journal(destination).job() is not None:
        console.print_next(console.command("k2convert", "status", destination))


def _validate_for_report(
    opened: _Opened, destination: str, source: str | None, *, quiet: bool
) -> ValidationReport | None:
    if not can_be_validated(opened.folder):
        if source is not None:
            raise CheckpointError(
                f"{destination}: not a finished checkpoint with shards, so it cannot be measured against {source}. "
                "Leave out --source."
            )
        return None
    with Display("report", Extent({"check": (opened.num_bytes, 0)}), quiet=quiet) as events:
        found = validate_checkpoint(
            folder=opened.folder,
            source=opened.source,
            events=events,
            shards=opened.shards,
            statistics=opened.statistics,
        )
    return _named(found, destination)


def _show_report(files: ReportFiles, as_json: bool) -> bool:
    """Print the written files; return whether nothing that was checked has failed."""
    written = {"html": files.page, "markdown": files.markdown, "picture": files.picture}
    document = figures_document(files.report)
    failed: list[int] = document["contract"]["failed"] if document["contract"] else []
    has_passed = document["contract"] is None or document["contract"]["passed"]
    if as_json:
        paths = {kind: None if path is None else str(path) for kind, path in written.items()}
        console.print_json({"files": paths, **document})
    else:
        for path in filter(None, written.values()):
            console.print_line(str(path))
        for sentence in document["missing"]:
            console.print_note(sentence)
    if not has_passed:
        which = f"contract rules broken: {', '.join(map(str, failed))}" if failed else "the validation failed"
        console.print_note(f"the report is written, but {which}. Do not publish or serve this result; see {files.page}")
    return has_passed
