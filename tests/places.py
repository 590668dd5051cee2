"""The places in which a checkpoint may lie: every verb reads the same from each."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

COMMIT: Final = "0123456789abcdef0123456789abcdef01234567"


def put_into_cache(source: Path, hub: Path, *, repo: str = "moon/tiny", commit: str = COMMIT) -> Path:
    """Lay out a folder as `hf download` does in its cache, and return the snapshot."""
    root = hub / f"models--{repo.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    (root / "blobs").mkdir()
    snapshot = root / "snapshots" / commit
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        data = path.read_bytes()
        is_large = path.suffix == ".safetensors"
        digest = hashlib.sha256(data) if is_large else hashlib.sha1(b"blob %d\0" % len(data) + data)
        blob = root / "blobs" / digest.hexdigest()
        blob.write_bytes(data)
        link = snapshot / path.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        up = "../" * (len(path.relative_to(source).parts) + 1)
        link.symlink_to(f"{up}blobs/{blob.name}")
    return snapshot


def _linked(source: Path, folder: Path) -> Path:
    (folder / source.name).symlink_to(source)
    return folder / source.name


def _staged(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder / source.name, copy_function=shutil.copy))


def _of_links(source: Path, folder: Path) -> Path:
    """Link every file and folder of the top level, and what nobody needs: loops, links to nothing and to a pipe."""
    root = folder / source.name
    root.mkdir()
    for path in source.iterdir():
        (root / path.name).symlink_to(path)
    (root / "loop").symlink_to(".")
    (root / "itself").symlink_to("itself")
    (root / "gone.txt").symlink_to("nowhere")
    return root


FOLDER_KINDS: Final[dict[str, Callable[[Path, Path], Path]]] = {
    "a snapshot of the cache": lambda source, folder: put_into_cache(
        source, folder / "hub", repo=f"moon/{source.name}"
    ),
    "a folder of links": _of_links,
    "plain": lambda source, _: source,
    "a linked folder": _linked,
    "a staged copy": _staged,
}
"""A function for each, the most usual first: it gets a checkpoint and an empty folder, and returns the place."""
