"""What a running stage reports to its caller. The command line shows it; tests collect it; SILENT drops it."""

from typing import Final, Protocol


class Events(Protocol):
    """Every method may be called from several threads."""

    def note(self, text: str) -> None:
        """Take one line for the person watching."""

    def progress(self, *, bytes_in: int = 0, bytes_out: int = 0, tensors: int = 0) -> None:
        """Take what was done since the last call: bytes read, bytes written or sent, tensors finished."""

    def shard_finished(self, shard: str) -> None:
        """Take the name of a shard that was just recorded."""

    def experts_computed(self, layer: int, done: int, total: int) -> None:
        """Take how many experts of a reference layer are computed."""


class _Silent:
    def note(self, text: str) -> None:
        pass

    def progress(self, *, bytes_in: int = 0, bytes_out: int = 0, tensors: int = 0) -> None:
        pass

    def shard_finished(self, shard: str) -> None:
        pass

    def experts_computed(self, layer: int, done: int, total: int) -> None:
        pass


SILENT: Final[Events] = _Silent()
