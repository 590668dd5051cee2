"""Reads Jane Austen's novels (public domain) from the Debian package r-cran-janeaustenr.

The package holds the six novels as an R lazy-load database. Each object is a big-endian length, a type byte ("2" bzip2,
"Z" raw LZMA2, else zlib) and an R serialization in XDR form (R Internals, section 1.8). Only the strings are read. The
lines of a paragraph are joined, as in the text that language models are trained on.
"""

from __future__ import annotations

import bz2
import lzma
import struct
import subprocess
import zlib
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = "r-cran-janeaustenr"
_NO_VALUE = {254, 242, 241, 251, 253, 247, 249, 250}  # R_NilValue, R_GlobalEnv and the other constants
_REFERENCE = 255
_CHARACTERS = 9
_STRINGS = 16
_SYMBOL = 1
_PAIRLIST = 2
_INTEGERS = 13
_LOGICALS = 10
_REALS = 14
_LIST = 19
_HAS_ATTRIBUTES = 0x200
_HAS_TAG = 0x400


def novel(work: Path, title: str) -> str:
    """Return the text of a novel ("Emma"); the first call downloads the package into `work`."""
    cached = work / f"{title.lower()}.txt"
    if not cached.exists():
        database = _database(work / "debian")
        cached.write_text(paragraphs(_novels(database.read_bytes())[title]), encoding="utf-8")
    return cached.read_text(encoding="utf-8")


def paragraphs(text: str) -> str:
    """Join the lines of each paragraph."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _database(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    command = ["apt-get", "download", "-q", PACKAGE]
    if subprocess.run(command, cwd=folder, check=False, capture_output=True).returncode:
        subprocess.run(["apt-get", "update", "-q"], check=True, capture_output=True)
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    archive = next(folder.glob(f"{PACKAGE}_*.deb"))
    subprocess.run(["dpkg", "-x", archive.name, "."], cwd=folder, check=True)
    return next(folder.rglob("Rdata.rdb"))


def _novels(database: bytes) -> dict[str, str]:
    """Return {title: text}; a novel is an object of more than 1,000 strings, and its first one is the title."""
    novels: dict[str, str] = {}
    position = 0
    while position < len(database):
        data, position = _decompress(database, position)
        reader = _Strings(data)
        reader.read_all()
        lines = [line for line in reader.found if line is not None]
        if len(lines) > 1000:
            novels[lines[0].title()] = "\n".join(lines)
    return novels


def _decompress(database: bytes, position: int) -> tuple[bytes, int]:
    kind = database[position + 4 : position + 5]
    body = position + 5
    if kind == b"2":
        stream = bz2.BZ2Decompressor()
    elif kind == b"Z":
        stream = lzma.LZMADecompressor(format=lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "preset": 6}])
    else:
        stream = zlib.decompressobj()
        body = position + 4
    data = stream.decompress(database[body:])
    return data, len(database) - len(stream.unused_data)


@dataclass(slots=True)
class _Strings:
    """Collects the strings of one serialized object, in order; None for NA."""

    data: bytes
    position: int = 0
    found: list[str | None] = field(default_factory=list)

    def read_all(self) -> None:
        self.position = 2 + 12  # "X\n", then format version and two R versions
        if struct.unpack_from(">i", self.data, 2)[0] == 3:
            self.position += 4 + struct.unpack_from(">i", self.data, self.position)[0]  # version 3 names its encoding
        self._item()

    def _integer(self) -> int:
        self.position += 4
        return struct.unpack_from(">i", self.data, self.position - 4)[0]

    def _item(self) -> None:
        flags = self._integer()
        kind = flags & 0xFF
        if kind == _REFERENCE:
            self._integer()
        elif kind == _CHARACTERS:
            length = self._integer()
            raw = self.data[self.position : self.position + max(length, 0)]
            self.found.append(None if length < 0 else raw.decode("utf-8", "replace"))
            self.position += max(length, 0)
        elif kind in (_STRINGS, _LIST):
            for _ in range(self._integer()):
                self._item()
        elif kind == _SYMBOL:
            self._item()
        elif kind == _PAIRLIST:
            for _ in range(2 + bool(flags & _HAS_ATTRIBUTES) + bool(flags & _HAS_TAG)):
                self._item()
        elif kind in (_INTEGERS, _LOGICALS, _REALS):
            self.position += self._integer() * (8 if kind == _REALS else 4)
        elif kind not in _NO_VALUE:
            raise ValueError(f"R type {kind} at byte {self.position} is not supported; only the types in {PACKAGE} are")
        if flags & _HAS_ATTRIBUTES and kind in (_STRINGS, _LIST, _INTEGERS, _LOGICALS, _REALS):
            self._item()
