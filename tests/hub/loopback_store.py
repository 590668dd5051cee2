"""The data of a loopback Hub: repositories as commits of file tables, LFS blobs on disk, and a local Xet store.

Xet: the real client accepts `local://FOLDER` as the address of its content store, so no Xet server is needed. The
store's own shard files say which sha256 became which Xet hash.
"""

import hashlib
import io
import json
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

XET_EXPIRY = 4_000_000_000


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a commit: bytes kept in git, or a sha256 whose bytes are in LFS or Xet storage."""

    size: int
    data: bytes | None = None
    sha256: str | None = None
    xet_hash: str | None = None

    @property
    def oid(self) -> str:
        if self.sha256 is not None:
            return hashlib.sha1(self.sha256.encode()).hexdigest()
        assert self.data is not None
        return hashlib.sha1(b"blob %d\0" % self.size + self.data).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 or self.oid


Files = dict[str, Entry]


@dataclass(slots=True)
class Repo:
    """Commits and the branches that point at them; `history` lists (branch, commit) in order."""

    private: bool = False
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Files] = field(default_factory=dict)
    history: list[tuple[str, str]] = field(default_factory=list)

    def find(self, revision: str) -> str | None:
        commit = self.refs.get(revision, revision)
        return commit if commit in self.commits else None

    def files(self, revision: str = "main") -> Files:
        return self.commits[self.refs.get(revision, revision)]

    def commit(self, branch: str, files: Files) -> str:
        table = [(path, entry.etag) for path, entry in sorted(files.items())]
        oid = hashlib.sha1(json.dumps([len(self.commits), branch, table]).encode()).hexdigest()
        self.commits[oid] = files
        self.refs[branch] = oid
        self.history.append((branch, oid))
        return oid

    def num_commits(self, branch: str) -> int:
        return sum(ref == branch for ref, _ in self.history)


class Store:
    """All repositories of one loopback Hub, with their blobs under `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.repos: dict[str, Repo] = {}
        self.lock = threading.RLock()
        for name in ("lfs", "cas", "tmp"):
            (root / name).mkdir(parents=True, exist_ok=True)

    def blob(self, sha256: str) -> Path:
        return self.root / "lfs" / sha256

    @property
    def cas_url(self) -> str:
        return f"local://{self.root}/cas"

    def create(self, name: str, *, private: bool = False) -> Repo:
        repo = self.repos[name] = Repo(private)
        attributes = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
        repo.commit("main", {".gitattributes": Entry(len(attributes), attributes)})
        return repo

    def add_folder(self, name: str, folder: Path, *, private: bool = False, hash_shards: bool = True) -> Repo:
        """Create a repository with a folder's files on main: shards in LFS, the rest in git.

        The store links to the shards, so the folder must not change. If `hash_shards` is false, they have invented
        hashes: for terabytes that no test downloads whole.
        """
        repo = self.create(name, private=private)
        files = dict(repo.files())
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            relative = path.relative_to(folder).as_posix()
            if path.suffix == ".safetensors":
                sha256 = sha256_of(path) if hash_shards else hashlib.sha256(str(path).encode()).hexdigest()
                if not self.blob(sha256).exists():
                    self.blob(sha256).symlink_to(path)
                files[relative] = Entry(path.stat().st_size, sha256=sha256)
            else:
                data = path.read_bytes()
                files[relative] = Entry(len(data), data)
        repo.commit("main", files)
        return repo

    def stored(self, sha256: str, size: int) -> Entry | None:
        """The entry of an object uploaded to LFS or Xet, or None."""
        xet_hash = self._xet_hash(sha256)
        if xet_hash is None and not self.blob(sha256).exists():
            return None
        return Entry(size, sha256=sha256, xet_hash=xet_hash)

    def size_of(self, sha256: str) -> int:
        entries = (e for r in self.repos.values() for c in r.commits.values() for e in c.values())
        return next(entry.size for entry in entries if entry.sha256 == sha256)

    def open(self, entry: Entry) -> BinaryIO:
        if entry.data is not None:
            return io.BytesIO(entry.data)
        assert entry.sha256 is not None
        if not self.blob(entry.sha256).exists():
            self._materialise_xet(entry, self.blob(entry.sha256))
        return self.blob(entry.sha256).open("rb")

    def read(self, name: str, path: str, revision: str = "main") -> bytes:
        with self.open(self.repos[name].files(revision)[path]) as file:
            return file.read()

    def _materialise_xet(self, entry: Entry, target: Path) -> None:
        import hf_xet

        with self.lock:
            temporary = self.root / "tmp" / target.name
            group = hf_xet.XetSession().new_file_download_group(
                endpoint=self.cas_url, token="t", token_expiry_unix_secs=XET_EXPIRY
            )
            with group as download:
                download.start_download_file(hf_xet.XetFileInfo(entry.xet_hash, entry.size), str(temporary))
            temporary.replace(target)

    def _xet_hash(self, sha256: str) -> str | None:
        for path in (self.root / "cas").rglob("*.mdb"):
            for digest, xet_hash in _read_xet_shard(path.read_bytes()):
                if digest == sha256:
                    return xet_hash
        return None


def _read_xet_shard(data: bytes) -> Iterator[tuple[str, str]]:
    """Pairs of sha256 and Xet hash in a metadata shard: 48-byte records, the file section ends with 32 bytes of FF."""
    position = 48
    while position + 48 <= len(data) and data[position : position + 32] != b"\xff" * 32:
        file_hash = data[position : position + 32]
        flags, num_entries = struct.unpack_from("<II", data, position + 32)
        position += 48 * (1 + num_entries * (2 if flags >> 31 else 1))
        if flags >> 30 & 1:
            yield _merkle_hex(data[position : position + 32]), _merkle_hex(file_hash)
            position += 48


def _merkle_hex(data: bytes) -> str:
    """A MerkleHash as text: four little-endian 64-bit words."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", data))
