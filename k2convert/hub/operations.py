"""The client library's operation for one file: counted while it is sent, or of a file that another process sent."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd


@dataclass(slots=True)
class SentCount:
    """Bytes of one file that were sent. `sent` gets the changes."""

    sent: Callable[[int], None]
    position: int = 0

    def move_to(self, position: int) -> None:
        if position != self.position:
            self.sent(position - self.position)
            self.position = position


def sent_operation(name: str, *, sha256: str, num_bytes: int) -> CommitOperationAdd:
    """Return the library's operation for a file that another process has sent: a commit needs its hash and size."""
    from huggingface_hub import CommitOperationAdd

    operation = CommitOperationAdd(name, b"")
    operation.upload_info.sha256 = bytes.fromhex(sha256)
    operation.upload_info.size = num_bytes
    operation._upload_mode, operation._is_uploaded = "lfs", True  # pyright: ignore[reportPrivateUsage]
    return operation


def counted_operation(name: str, path: Path, count: SentCount) -> CommitOperationAdd:
    """Return the library's operation for one file; `count` follows what plain LFS reads from the file to send it."""
    from huggingface_hub import CommitOperationAdd

    class Counted(CommitOperationAdd):
        @contextmanager
        def as_file(self, with_tqdm: bool = False) -> Generator[BinaryIO]:
            with path.open("rb") as file:
                if with_tqdm:  # the library asks for a progress bar, so it is going to send the bytes
                    read = file.read

                    def read_counted(size: int | None = -1) -> bytes:
                        data = read(size)
                        count.move_to(file.tell())
                        return data

                    file.read = read_counted
                yield file

    return Counted(name, path)
