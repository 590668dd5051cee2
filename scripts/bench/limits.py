"""Shows what the disk allows: copy + fsync, read, and durable write, each run as a separate process."""

import os
import shutil
import sys
from pathlib import Path


def copy_folder(source: Path, destination: Path) -> None:
    """Copy every file as `cp` does and sync it."""
    destination.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        if path.is_file():
            shutil.copyfile(path, destination / path.name)  # uses copy_file_range or sendfile, like cp
            descriptor = os.open(destination / path.name, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def read_folder(source: Path) -> None:
    """Read every file in 16 MB pieces."""
    buffer = bytearray(16 << 20)
    for path in sorted(source.iterdir()):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def write_folder(source: Path, destination: Path) -> None:
    """Write the same number of bytes as the source, with k2convert's writer."""
    from k2convert.checkpoint.writer import ShardWriter

    destination.mkdir(parents=True)
    piece = os.urandom(1 << 20) * 16
    for path in sorted(source.iterdir()):
        if path.is_file() and (size := path.stat().st_size):
            with ShardWriter(destination / path.name, size) as writer:
                for begin in range(0, size, len(piece)):
                    writer.write(memoryview(piece)[: size - begin])
                writer.commit()


if __name__ == "__main__":
    {"copy": copy_folder, "read": read_folder, "write": write_folder}[sys.argv[1]](*map(Path, sys.argv[2:]))
