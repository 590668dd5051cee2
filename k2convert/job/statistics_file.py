"""The statistics file that a pass or a walk ends with: where it goes, its header, and how it is put together."""

import platform
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from k2convert import __version__
from k2convert.calibrate.layer_statistics import LayerStatistics
from k2convert.calibrate.statistics import Statistics, StatisticsHeader, open_statistics, write_statistics
from k2convert.calibrate.text import Windows
from k2convert.calibrate.work import WorkFolder
from k2convert.errors import DestinationError, quoted
from k2convert.hub.client import SCHEME, Hub
from k2convert.hub.named_file import fetch_named_file
from k2convert.job.places import shown_as
from k2convert.models.names import Architecture

_LIBRARIES: Final = ("numpy", "torch", "transformers", "tokenizers", "tiktoken")
STATISTICS_SUFFIX: Final = ".stats"
_LAYER_SLACK_BYTES: Final = 1 << 16  # of the files of a layer, without the arrays


def check_statistics_path(path: Path, *, source: Path | None) -> None:
    """Refuse a path that no file can be written to, or that is in the source; raises DestinationError."""
    if path.is_dir():
        raise DestinationError(f"{path}: is a folder. Name a file to write the statistics to.")
    if path.is_symlink():
        raise DestinationError(f"{path}: is a link. Remove it, or choose a different name.")
    for parent in path.absolute().parents:
        if parent.exists() and not parent.is_dir():
            raise DestinationError(f"{path}: {parent} is a file, not a folder. Choose a different name.")
    if source is not None and path.resolve().is_relative_to(source.resolve()):
        raise DestinationError(f"{path}: is inside the source, which is never written to. Choose a path outside it.")


@contextmanager
def open_named_statistics(text: str | None, *, hub: Hub) -> Generator[Statistics | None]:
    """Open a statistics file, or one of the Hub, which is here for the block; None without a name.

    Raises CalibrationError, HubError. `Statistics.origin` is then the address with its commit.
    """
    if text is None or not text.startswith(SCHEME):
        yield None if text is None else open_statistics(Path(text))
        return
    with tempfile.TemporaryDirectory(prefix="k2convert-") as temporary:
        path, origin = fetch_named_file(hub, text, suffix=STATISTICS_SUFFIX, folder=Path(temporary))
        with shown_as(origin, path):
            found = open_statistics(path)
            found.origin = origin
            yield found


def statistics_header(windows: Windows, *, source_headers: str, seed: int) -> StatisticsHeader:
    """Return the header of the statistics file, without dropped windows."""
    return StatisticsHeader(
        source_headers=source_headers,
        texts=windows.texts,
        tokens=windows.ids.size,
        window=windows.ids.shape[1],
        windows=windows.ids.shape[0],
        dropped=0,
        seed=seed,
        versions=_versions(),
    )


def _versions() -> dict[str, str]:
    """Return the versions of k2convert, of Python, and of the libraries that compute and read the text."""
    own = {"k2convert": __version__, "python": platform.python_version()}
    return own | {name: version(name) for name in _LIBRARIES}


def text_identity(windows: Windows) -> str:
    """Return the names and digests of the texts, as the identity of a pass or a job has them."""
    return ", ".join(f"{name} ({digest})" for name, digest in windows.texts)


def statistics_bytes(architecture: Architecture) -> int:
    """Return about how many bytes the statistics of all layers have."""
    floats = architecture.num_experts * (architecture.moe_intermediate_size + 4) + 4 * architecture.hidden_size
    return architecture.num_layers * (4 * floats + _LAYER_SLACK_BYTES)


def found_header(path: Path, header: StatisticsHeader) -> StatisticsHeader | None:
    """Return the header of a statistics file that is there, if it was made from what `header` says; None without one.

    Raises DestinationError if the file was made from something else.
    """
    if not path.exists():
        return None
    found = open_statistics(path)
    for field in ("source_headers", "texts", "tokens", "window", "windows", "seed"):
        if getattr(found, field) != (now := getattr(header, field)):
            raise DestinationError(
                f"{path}: exists, made from something else: {field} was {quoted(getattr(found, field))}, now "
                f"{quoted(now)}. Choose a different name, or remove the file."
            )
    return replace(header, dropped=found.dropped, versions=found.versions)


def gather_statistics(work: WorkFolder, path: Path, header: StatisticsHeader, *, num_layers: int) -> StatisticsHeader:
    """Write the statistics file from those of the layers; returns its header.

    `header` has no dropped windows yet. Raises CheckpointError if the file of a layer is damaged.
    """
    layers: list[LayerStatistics] = []
    dropped = 0
    for layer in range(num_layers):
        found = work.read_layer(layer)
        layers.append(found.layer(layer))
        dropped = found.dropped
    header = replace(header, dropped=dropped)
    write_statistics(path, layers, header)
    return header


def source_fields(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a conversion's fingerprint that statistics depend on too."""
    return {key: fingerprint[key] for key in ("arithmetic", "source_revision", "source_headers", "source_config")}
