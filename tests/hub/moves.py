"""How a source on the loopback Hub moves: its small files, its config.json, its weights, its history."""

import json
from pathlib import Path

from loopback import LoopbackHub
from loopback_store import Entry, Files

SOURCE = "hf://moon/tiny"
OLD_CODE = "tokenization_old.py"
SHARD = "model-00002-of-000005.safetensors"


def entry(data: bytes) -> Entry:
    return Entry(len(data), data)


def with_config(files: Files, **fields: object) -> Files:
    config = files["config.json"].data
    assert config is not None
    return files | {"config.json": entry(json.dumps(json.loads(config) | fields).encode())}


def moved(files: Files) -> Files:
    """A new template, new code in place of the old, and another end of text: what maintainers mend after a release."""
    new = {"chat_template.jinja": entry(b"{{ messages }}"), "tokenization_new.py": entry(b"NEW = True\n")}
    retained = {path: file for path, file in files.items() if path != OLD_CODE}
    return with_config(retained | new, eos_token_id=[0, 1])


def move(server: LoopbackHub) -> tuple[str, str]:
    """Move main of the source; returns the old commit and the new one."""
    repo = server.store.repos["moon/tiny"]
    before = repo.refs["main"]
    server.traffic.requests.clear()
    return before, repo.commit("main", moved(repo.files()))


def retrained(server: LoopbackHub, tiny: Path, folder: Path) -> Files:
    """The files of main with other bytes in SHARD, under the same header."""
    folder.mkdir()
    data = bytearray((tiny / SHARD).read_bytes())
    data[-1000] ^= 1
    (folder / SHARD).write_bytes(data)
    return server.store.repos["moon/tiny"].files() | {
        SHARD: server.store.add_folder("moon/other", folder).files()[SHARD]
    }


def forget(server: LoopbackHub, commit: str) -> None:
    """Let a commit be gone, as after a force-push."""
    del server.store.repos["moon/tiny"].commits[commit]
