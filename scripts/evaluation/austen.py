"""Reads Jane Austen's novels (public domain) from the Debian package r-cran-janeaustenr.

The package holds the six novels as an R lazy-load database. Each object is a big-endian length and a zlib stream of a
vector of lines, serialized in XDR form, version 3 (R Internals, section 1.8). The lines of a paragraph are joined, as
in the text that language models are trained on.
"""

import struct
import subprocess
import zlib
from pathlib import Path

PACKAGE = "r-cran-janeaustenr"
_STRINGS = 16


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
    """Return {title: text}; each object is a novel, and its first string is the title."""
    novels: dict[str, str] = {}
    while database:
        stream = zlib.decompressobj()
        lines = _strings(stream.decompress(database[4:]))
        novels[lines[0].title()] = "\n".join(lines)
        database = stream.unused_data
    return novels


def _strings(data: bytes) -> list[str]:
    """Read a serialized vector of strings."""
    (length_of_encoding,) = struct.unpack_from(">i", data, 14)  # behind "X\n", the version, and two of R
    position = 18 + length_of_encoding
    kind, count = struct.unpack_from(">ii", data, position)
    if kind != _STRINGS:
        raise ValueError(f"R type {kind} in {PACKAGE} is not supported; only vectors of strings are")
    strings: list[str] = []
    position += 8
    for _ in range(count):
        (length,) = struct.unpack_from(">i", data, position + 4)
        position += 8 + length
        strings.append(data[position - length : position].decode())
    return strings
