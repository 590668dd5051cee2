"""On a real device a layer of the streamed pass is the CPU's within TF32, and its router is the CPU's in FP32."""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from k2convert.checkpoint.index import open_checkpoint
from k2convert.forward.decoder import DecoderLayer, embed
from k2convert.forward.moe import read_router
from k2convert.forward.weights import WeightReader
from tests.forward.observers import Seen

pytest.importorskip("transformers")


@pytest.mark.parametrize("devices", [("cuda",), ("cuda", "cuda")])
def test_layers_are_those_of_the_cpu(tiny: Path, devices: tuple[str, ...]) -> None:
    ids = torch.randint(0, 2048, (4, 128), generator=torch.Generator().manual_seed(1))
    with closing(WeightReader(open_checkpoint(tiny))) as reader:
        hidden = embed(reader, ids)
        for layer in range(4):
            seen = Seen()
            expected = DecoderLayer(reader, layer).run(hidden)
            found = DecoderLayer(reader, layer, devices, workers=3).run(hidden, seen)
            assert found.device == hidden.device
            assert all(mlp.tokens.is_cuda for mlp in seen.experts)
            assert seen.outputs[0].is_cuda
            # A token near a tie of the router may choose another expert for TF32's noise in the attention.
            close = torch.nn.functional.cosine_similarity(found, expected, dim=-1) > 0.9999
            assert float(close.float().mean()) > 0.99
            if seen.routings[0] is not None:
                routing = read_router(reader, f"model.layers.{layer}.mlp")(seen.inputs[0].cpu())
                same = seen.routings[0].experts.cpu().sort().values == routing.experts.sort().values
                assert float(same.float().mean()) > 0.999, "only exact ties may differ: the router does not use TF32"
            hidden = expected
