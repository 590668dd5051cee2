"""Ways in which a file on disk can be damaged."""

from pathlib import Path
from typing import Final

DAMAGES: Final = ("flipped", "empty", "truncated", "zeros", "foreign", "missing")


def flip(path: Path, position: int) -> None:
    """Flip the lowest bit of one byte of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def damage_file(path: Path, damage: str, *, foreign: Path) -> None:
    """Damage a file in one of these ways. `foreign` is a file of something else."""
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
        return
    content[len(content) * 2 // 3] ^= 1
    damaged = {
        "flipped": lambda: content,
        "empty": lambda: b"",
        "truncated": lambda: content[: len(content) // 2],
        "zeros": lambda: bytes(len(content)),
        "foreign": lambda: foreign.read_bytes(),
    }
    path.write_bytes(damaged[damage]())
