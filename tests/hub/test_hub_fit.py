"""`fit` of a repository: from its headers, without a shard."""

import json
from pathlib import Path

from command import RunCli
from loopback import LoopbackHub


def test_a_repository_is_weighed_like_its_folder_and_no_shard_is_downloaded(
    tiny_on_hub: LoopbackHub, tiny: Path, hub_cli: RunCli
) -> None:
    shard_bytes = sum(path.stat().st_size for path in tiny.glob("*.safetensors"))
    remote, local = (
        json.loads(hub_cli("fit", place, "--gpu", "b200", "--count", "2", "--json").stdout)
        for place in ("hf://moon/tiny", tiny)
    )
    assert remote == local | {"checkpoint": "hf://moon/tiny"}
    requests = tiny_on_hub.traffic.requests
    assert sum(request.sent for request in requests if ".safetensors" in request.path) < shard_bytes / 2
