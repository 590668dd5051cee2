"""A checkpoint folder as its index, config and headers describe it, checked for agreement.

No tensor is read. The same `Checkpoint` is built from a local folder and from headers fetched over a network.

Libraries complete the configs that they get in place, so they get copies, and so does what writes a config.

Also here: the files next to the weights (tokenizer, chat template, processors, license), which are copied.
"""

import ast
import os
import re
import shlex
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from stat import S_ISDIR, S_ISREG
from typing import Any, Final, cast

from k2convert.checkpoint.files import (
    check_fetched,
    check_plain_file,
    is_there,
    list_folder,
    mapping_or_empty,
    mode_of,
    parse_json_object,
    read_json_file,
    read_small_file,
    read_text_file,
    walk_folder,
)
from k2convert.checkpoint.header import ShardHeader, TensorInfo, read_header
from k2convert.checkpoint.names import (
    BLOBS_FOLDER,
    CARD_NAME,
    CONFIG_NAME,
    EVALUATION_NAME,
    HF_QUANT_CONFIG_NAME,
    INDEX_NAME,
    JOB_NAME,
    LEDGER_NAME,
    PROCESSOR_NAMES,
    PRUNE_NAME,
    SHARD_SUFFIX,
    SINGLE_SHARD_NAME,
    SNAPSHOTS,
    TIKTOKEN_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    WORK_FOLDER,
)
from k2convert.errors import CheckpointError, MalformedFileError, quoted, shortened

MAX_SHARD_NAME_BYTES: Final = 230  # filesystems take 255; records, downloads and temporary files add to the name


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Headers, index and config of one checkpoint. `tensors` spans all shards; nobody changes `config`."""

    folder: Path
    config_text: str
    headers: dict[str, ShardHeader]
    tensors: dict[str, TensorInfo]
    index_metadata: dict[str, Any]
    stray_shards: tuple[str, ...]
    config: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", self.parse_config())

    def parse_config(self) -> dict[str, Any]:
        """Return config.json, parsed from its text: a copy of its own for each caller, which may change it."""
        return parse_json_object(self.config_text, where=str(self.folder / CONFIG_NAME))

    @property
    def tensor_bytes(self) -> int:
        return sum(t.num_bytes for t in self.tensors.values())

    def path(self, shard: str) -> Path:
        return self.folder / shard


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read config, index and headers of a folder; raises CheckpointError."""
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "no such folder"
        raise CheckpointError(f"{folder}: {problem}. Pass the folder that holds {CONFIG_NAME} and the shards.")
    check_level(folder)
    refuse_links_out(folder, (CONFIG_NAME, INDEX_NAME))
    config_text = read_text_file(folder / CONFIG_NAME)
    index_path = folder / INDEX_NAME
    index = read_json_file(index_path) if is_there(index_path) else None
    if index is None and not (folder / SINGLE_SHARD_NAME).exists():
        others = [path.name for path in list_folder(folder) if path.suffix in _OTHER_FORMS]
        hint = f" (there is {shortened(others[0])})" if others else ""
        raise MalformedFileError(
            f"{folder}: has neither {INDEX_NAME} nor {SINGLE_SHARD_NAME}. The download is incomplete, "
            f"or this is not a safetensors checkpoint{hint}."
        )
    present = [path.name for path in list_folder(folder) if path.name.endswith(SHARD_SUFFIX)]
    return build_checkpoint(
        folder=folder,
        config_text=config_text,
        index=index,
        present=present,
        load=lambda shard: read_header(folder / shard),
    )


def check_level(folder: Path) -> None:
    """Refuse a folder above a checkpoint's, as that of a repository in the Hub's cache, and what a job has not
    finished (CheckpointError).
    """
    with suppress(OSError):  # what cannot be looked at is not the one
        if is_there(folder / CONFIG_NAME):
            return
        if any(is_there(folder / WORK_FOLDER / name) for name in (JOB_NAME, PRUNE_NAME)):
            raise CheckpointError(
                f"{folder}: is not finished. `k2convert status {shlex.quote(str(folder))}` says how to finish it."
            )
        folders = [path.parent for level in ("*", f"{SNAPSHOTS}/*") for path in folder.glob(f"{level}/{CONFIG_NAME}")]
        if folders:
            newest = max(folders, key=lambda path: path.stat().st_mtime)
            raise CheckpointError(f"{folder}: has no {CONFIG_NAME}, but {newest} has one. Pass that folder.")


def build_checkpoint(
    *,
    folder: Path,
    config_text: str,
    index: dict[str, Any] | None,
    present: list[str],
    load: Callable[[str], ShardHeader],
) -> Checkpoint:
    """Check an index against the headers that `load(shard name)` returns. `present` names the existing shard files."""
    weight_map = _weight_map(index, folder=folder)
    names = sorted(set(weight_map.values())) or [SINGLE_SHARD_NAME]
    headers = {shard: load(shard) for shard in names}
    tensors: dict[str, TensorInfo] = {}
    for header in headers.values():
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise MalformedFileError(
                    f"{folder}: tensor {name} appears in both {tensors[name].shard} and {tensor.shard}: these shards "
                    "are from different checkpoints."
                )
            tensors[name] = tensor
    for name, shard in weight_map.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.shard != shard:
            actual = "no shard has it"
            if tensor is not None:
                actual = f"it is in {tensor.shard}"
            raise MalformedFileError(
                f"{folder / INDEX_NAME}: tensor {shortened(name)} is mapped to {shortened(shard)}, but {actual}."
            )
    if weight_map and len(weight_map) != len(tensors):
        extra = next(name for name in tensors if name not in weight_map)
        raise CheckpointError(
            f"{folder / tensors[extra].shard}: tensor {extra} is not in {INDEX_NAME}. Add it to its weight_map, or "
            "save the model again, so that shards and index are of one run."
        )
    metadata: object = (index or {}).get("metadata") or {}
    if not isinstance(metadata, dict):
        raise MalformedFileError(f"{folder / INDEX_NAME}: metadata is not a JSON object.")
    stray = tuple(shard for shard in present if shard not in headers)
    return Checkpoint(folder, config_text, headers, tensors, cast(dict[str, Any], metadata), stray)


def _weight_map(index: dict[str, Any] | None, *, folder: Path) -> dict[str, str]:
    if index is None:
        return {}
    where = folder / INDEX_NAME
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise MalformedFileError(f"{where}: has no weight_map.")
    checked: set[str] = set()
    for tensor, shard in cast(dict[str, Any], weight_map).items():
        if isinstance(shard, str) and shard in checked:
            continue
        problem = ""
        if not isinstance(shard, str) or not shard.endswith(SHARD_SUFFIX):
            problem = f"not to a {SHARD_SUFFIX} file"
        elif PurePosixPath(shard).name != shard or "\\" in shard or not shard.isprintable():
            problem = "a path outside the folder. A shard must be a plain file name"
        elif len(shard.encode()) > MAX_SHARD_NAME_BYTES:
            problem = f"a name too long for a shard (more than {MAX_SHARD_NAME_BYTES} bytes)"
        if problem:
            raise MalformedFileError(f"{where}: tensor {shortened(tensor)} is mapped to {quoted(shard)}, {problem}.")
        checked.add(shard)
    return cast(dict[str, str], weight_map)


# The source's model card and evaluation would describe the wrong weights. The conversion writes the other names.
_NOT_COPIED: Final = frozenset({CONFIG_NAME, INDEX_NAME, HF_QUANT_CONFIG_NAME, LEDGER_NAME, CARD_NAME, EVALUATION_NAME})
_READ_SUFFIXES: Final = frozenset({".json", ".model", ".py", ".jinja"})  # tokenizers, templates, code
_WEIGHT_SUFFIXES: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".tmp", ".part"})
_READ_TEXTS: Final = frozenset({"merges.txt", "vocab.txt"})  # other texts are notes


def is_part_of_checkpoint(relative: Path) -> bool:
    """Return whether an engine or a validation takes a file, by its path in a folder, for a part of the checkpoint."""
    if relative.suffix in _WEIGHT_SUFFIXES or relative.suffix == ".py":
        return True
    return len(relative.parts) == 1 and (relative.suffix in _READ_SUFFIXES or relative.name in _READ_TEXTS)


def home_folders(folder: Path) -> set[Path]:
    """Return the folders of a checkpoint without links: its own, and the checkpoint or the cache's REPOSITORY that its
    config.json is linked to.
    """
    home = Path(os.path.realpath(folder / CONFIG_NAME)).parent  # Path.resolve refuses a link to itself
    homes = {folder.resolve()}
    if home.name == BLOBS_FOLDER and (home.parent / SNAPSHOTS).is_dir():
        homes.add(home.parent)
    elif any(is_there(home / name) for name in (INDEX_NAME, SINGLE_SHARD_NAME)):
        homes.add(home)
    return homes


def links_out(folder: Path) -> dict[Path, Path]:
    """Return the files that lead out of a checkpoint by a link, and where to. Shards may, and are not listed.

    Whoever made the checkpoint may have linked to a file of its reader: such files are neither copied nor published.
    """
    homes = home_folders(folder)
    files = (path for path in walk_folder(folder) if path.suffix != SHARD_SUFFIX and S_ISREG(mode_of(path)))
    targets = {path.relative_to(folder): Path(os.path.realpath(path)) for path in files}
    return {path: target for path, target in targets.items() if not any(target.is_relative_to(home) for home in homes)}


def engine_links_out(folder: Path) -> dict[Path, Path]:
    """Return those of them that a conversion would copy, were they files, and that an engine reads."""
    return {
        path: target
        for path, target in links_out(folder).items()
        if is_part_of_checkpoint(path) and path.suffix not in _WEIGHT_SUFFIXES and str(path) not in _NOT_COPIED
    }


def refuse_links_out(folder: Path, needed: Iterable[str | Path]) -> None:
    """Refuse files that lead out of a checkpoint by a link and that a job needs, by their paths (CheckpointError)."""
    homes = home_folders(folder)
    for path in (folder / name for name in needed):
        target = Path(os.path.realpath(path))
        if S_ISREG(mode_of(path)) and not any(target.is_relative_to(home) for home in homes):
            raise CheckpointError(
                f"{path}: is a link to {target}, out of the checkpoint. Only weights may lie elsewhere. Put the file "
                "in place of the link."
            )


def list_sidecars(folder: Path) -> list[Path]:
    """Return the files to copy, sorted; raises MalformedFileError for a Git LFS pointer, and for a link to nothing."""
    sidecars: list[Path] = []
    others = links_out(folder)
    for path in walk_folder(folder):
        relative = path.relative_to(folder)
        if any(part.startswith(".") or part == "__pycache__" for part in relative.parts):
            continue
        if str(relative) in _NOT_COPIED or path.suffix in _WEIGHT_SUFFIXES:
            continue
        mode = mode_of(path)
        if path.parent == folder and path.suffix in _READ_SUFFIXES and path.is_symlink() and not S_ISDIR(mode):
            check_plain_file(path)
        if S_ISREG(mode) and relative not in others:
            try:
                path.name.encode()
            except UnicodeEncodeError:
                raise MalformedFileError(
                    f"{path.parent}: the name {shortened(path.name)} is not UTF-8. Rename the file."
                ) from None
            check_fetched(path)
            sidecars.append(relative)
    return sidecars


_OTHER_FORMS: Final = (".gguf", ".bin", ".pt", ".pth")  # of weights
_TOKENIZERS: Final = (TOKENIZER_NAME, TIKTOKEN_NAME, "tokenizer.model", "vocab.json")
_WITH_CODE: Final = (CONFIG_NAME, TOKENIZER_CONFIG_NAME, *PROCESSOR_NAMES)


def missing_sidecars(folder: Path) -> list[tuple[str, str]]:
    """Return what an engine lacks in a folder beside the weights, by file: a tokenizer, what configs and code name.

    Also the links that are left out, whose files a result and the Hub will lack.
    """
    there = [name for name in _TOKENIZERS if (folder / name).exists()]
    rows = _vocabulary_size(folder)
    missing = [(name, problem) for name in there if (problem := _damage_of(folder / name, rows))]
    if not there:
        missing.append((TOKENIZER_NAME, f"missing, and {TIKTOKEN_NAME} too: engines need the tokenizer"))
    needed: dict[str, str] = {}
    for name in _WITH_CODE:
        needed |= _named_files(folder / name)
    waiting = list(needed)
    for name in waiting:  # which grows
        for other in _files_of_code(folder, name):
            if other not in needed:
                needed[other] = name
                waiting.append(other)
    lacking = {name: user for name, user in needed.items() if not (folder / name).exists()}
    left_out = {path: f"{target}, out of the checkpoint" for path, target in links_out(folder).items()}
    for path in walk_folder(folder):
        if path.is_symlink() and not mode_of(path) and path.suffix != SHARD_SUFFIX:
            left_out[path.relative_to(folder)] = f"{quoted(str(path.readlink()))}, which leads to no file"
    advice = "If it is a part of the model, put the file in place of the link"
    for path, target in left_out.items():
        is_hidden = any(part.startswith(".") for part in path.parts)
        if not is_hidden and path.name not in (LEDGER_NAME, EVALUATION_NAME):
            missing.append((str(path), f"left out: a link to {target}. {advice}"))
    return missing + [(name, f"missing, but {user} names it") for name, user in lacking.items()]


_FILE_NAME: Final = re.compile(r"([\w-]+/)*[\w-]+(\.\w+)+")


def _vocabulary_size(folder: Path) -> int | None:
    with suppress(CheckpointError):
        config = read_json_file(folder / CONFIG_NAME)
        size = mapping_or_empty(config.get("text_config", config)).get("vocab_size")
        return size if isinstance(size, int) else None
    return None


def _damage_of(path: Path, rows: int | None) -> str:
    """Return why no engine can use a tokenizer's file with an embedding of so many rows; empty if one may."""
    if path.stat().st_size == 0:
        return "empty: engines need the tokenizer"
    try:
        count = _count_ids(path)
    except CheckpointError:
        return "not a JSON object: engines need the tokenizer" if path.suffix == ".json" else ""
    if rows is not None and count > rows:
        return f"has {count:,} ids, but the embedding has {rows:,} rows: use the tokenizer of these weights"
    return ""


def _count_ids(path: Path) -> int:
    """Return the number of ids of tokenizer.json or tiktoken.model; 0 for other files. Raises CheckpointError."""
    if path.name == TIKTOKEN_NAME:
        return sum(map(bool, read_small_file(path).splitlines())) + NUM_SPECIAL_TOKENS
    document = read_json_file(path) if path.suffix == ".json" else {}
    added: object = document.get("added_tokens")
    ids: list[object] = list(mapping_or_empty(mapping_or_empty(document.get("model")).get("vocab")).values())
    ids += [mapping_or_empty(token).get("id") for token in cast(list[object], added if isinstance(added, list) else [])]
    return 1 + max((number for number in ids if isinstance(number, int)), default=-1)


NUM_SPECIAL_TOKENS: Final = 256
"""The ids after the last rank are special tokens in Kimi's tokenizer, named by the config or reserved."""


def _named_files(path: Path) -> dict[str, str]:
    """Return the files that a config expects beside it, each with what names it; none if it cannot be read."""
    try:
        document = read_json_file(path)
    except CheckpointError:
        return {}
    texts = {key: value for key, value in document.items() if key.endswith("file") and isinstance(value, str)}
    files = {value: f"{key} of {path.name}" for key, value in texts.items() if _FILE_NAME.fullmatch(value)}
    entries: list[Any] = list(mapping_or_empty(document.get("auto_map")).values())
    flat = [part for entry in entries for part in (cast(list[Any], entry) if isinstance(entry, list) else [entry])]
    here = (part for part in flat if isinstance(part, str) and "--" not in part)  # owner/name--module is elsewhere
    modules = (part.rpartition(".")[0].replace(".", "/") for part in here if "." in part)
    return files | {f"{module}.py": f"auto_map of {path.name}" for module in modules}


def _files_of_code(folder: Path, name: str) -> list[str]:
    """Return the files that a Python file expects beside it: imports, paths of `__file__`, a tokenizer's vocabulary."""
    path = folder / name
    try:
        nodes = list(ast.walk(ast.parse(read_text_file(path)))) if path.suffix == ".py" else []
    except (CheckpointError, SyntaxError, ValueError, RecursionError, MemoryError):  # the parser has limits too
        return []
    files: list[str] = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and 0 < node.level <= len(Path(name).parents):
            home = Path(name).parents[node.level - 1]
            modules = {home / (node.module or alias.name).replace(".", "/") for alias in node.names}
            files += [f"{module}.py" for module in modules if not (folder / module).is_dir()]
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if "vocab_files_names" in [getattr(target, "id", "").lower() for target in targets]:
                constants = [part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
                files += [text for text in constants if isinstance(text, str) and "." in text]
        elif isinstance(node, ast.BinOp | ast.Call) and (relative := _path_beside(node)):
            files.append((Path(name).parent / relative).as_posix())
    return files


def _path_beside(node: ast.BinOp | ast.Call) -> str:
    """Return the path of a file that code finds by its own `__file__`, relative to it; "" for anything else.

    Such as os.path.join(os.path.dirname(__file__), "a.json") or Path(__file__).parent / "a.json".
    """
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") not in ("join", "joinpath", "with_name"):
        return ""
    text = ast.unparse(node)
    if "__file__" not in text or ".." in text or ".parent.parent" in text:
        return ""
    path = "/".join(re.findall(r"'([^']+)'", text))
    return path if _FILE_NAME.fullmatch(path) else ""
