"""The bytes of results do not change by accident: shards of the tiny checkpoint have the hashes of version 0.1.

A change on purpose raises records.fingerprint.ARITHMETIC_VERSION, so that no unfinished job mixes both, and then these.
"""

from pathlib import Path

import pytest
from blake3 import blake3

from k2convert.checkpoint.index import open_checkpoint
from k2convert.job.execute import execute
from k2convert.job.places import Destination, Source
from k2convert.job.prepare import choose_recipe, prepare

HASHES = {
    ("optimal", "modelopt", "w4a4"): "785f2d342193277ee0a363ebcee82d4b",
    ("optimal", "modelopt", "w4a16"): "5a51e3fa7b1c5614e6ec538fe70e9405",
    ("optimal", "compressed-tensors", "w4a4"): "f27122bb1475b872c7fd5f0105160f49",
    ("optimal", "compressed-tensors", "w4a16"): "3042d68ecb4eeb83cd1049ebeac55e8b",
    ("plain", "modelopt", "w4a4"): "db9b6f12e04b5b8dd5b4ae6725fe3d50",
    ("plain", "modelopt", "w4a16"): "42b04905a3cb33ce0311ac70d119443a",
    ("plain", "compressed-tensors", "w4a4"): "6f1638f6a3f71a74e960d5a040622ff0",
    ("plain", "compressed-tensors", "w4a16"): "d1b767a9b136351183a676a23c5ee725",
}


@pytest.mark.parametrize(("rule", "layout", "activations"), HASHES)
def test_shards_have_the_bytes_of_version_0_1(
    rule: str, layout: str, activations: str, tiny: Path, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(tiny)
    overrides = {"rule": rule, "layout": layout, "activations": activations}
    recipe = choose_recipe(checkpoint, "kimi-k2-thinking-nvfp4-mlp", overrides)
    execute(prepare(source=Source(checkpoint), destination=Destination(tmp_path / "out"), recipe=recipe, device="cpu"))
    digest = blake3()
    for shard in sorted((tmp_path / "out").glob("*.safetensors")):
        digest.update(shard.read_bytes())
    assert digest.hexdigest()[:32] == HASHES[rule, layout, activations]
