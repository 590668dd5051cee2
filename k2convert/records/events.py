"""Reports of a running stage to its caller. The command line shows it; tests collect it; SILENT drops it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol

Phase = Literal["download", "copy", "convert", "upload", "check", "layers", "calibrate", "evaluate"]


@dataclass(frozen=True, slots=True)
class Extent:
    """Extent of a stage. `calibrate` and `evaluate` count the tokens of every layer, the head being one."""

    phases: Mapping[Phase, tuple[int, int]]  # bytes in total, and those that an earlier run has done
    shards: int = 0  # 0 for a stage that does not count shards
    finished_shards: int = 0
    num_experts: int = 0  # of all reference layers
    layer_tokens: int = 0  # that a layer has


Keep = Callable[[str], None]  # stores one line of text that other processes may read while this one runs


class Events(Protocol):
    """A stage calls these methods, from several threads. A subclass overrides some: the others do nothing."""

    def note(self, text: str) -> None:
        """Take one line for the person watching."""

    def begun(self, extent: Extent, *, keep: Keep | None = None) -> None:
        """Take what is to be done, before the first progress, and where to keep a summary for `status`."""

    def progress(self, *, bytes_in: int = 0, bytes_out: int = 0, tensors: int = 0) -> None:
        """Take what was done since the last call: bytes read, bytes written, tensors finished."""

    def transferred(self, *, downloaded: int = 0, uploaded: int = 0, is_new: bool = True) -> None:
        """Take the bytes that crossed the network since the last call; not `is_new`: in an earlier run."""

    def waits(self, phase: str, reason: str) -> None:
        """Take what a phase does or waits for while it counts nothing; its next bytes end that, or an empty reason."""

    def shard_finished(self, shard: str) -> None:
        """Take the name of a shard that was just recorded."""

    def experts_computed(self, layer: int, done: int, total: int) -> None:
        """Take how many experts of a reference layer are computed."""

    def tokens_computed(self, tokens: int) -> None:
        """Take how many tokens a layer computed since the last call."""


class _Silent(Events):
    pass


SILENT: Final[Events] = _Silent()
