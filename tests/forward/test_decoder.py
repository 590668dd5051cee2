"""The streamed pass is transformers' own network: hidden states after every layer, and routing exactly."""

import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from grouped_queries import with_grouped_queries
from torch import Tensor

from k2convert.checkpoint.index import open_checkpoint
from k2convert.errors import CalibrationError, K2ConvertError
from k2convert.forward.decoder import DENSE_PIECE_TOKENS, DecoderLayer, embed
from k2convert.forward.weights import WeightReader
from k2convert.models.config import text_config
from scripts.fixture_maker.damage import edit_config
from scripts.fixture_maker.inventory import SMALL_SHAPE
from scripts.fixture_maker.shaped import make_k2_shaped
from tests.forward.observers import Recorder, transformers_states

pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")


def token_ids(folder: Path, *, windows: int, length: int) -> Tensor:
    vocabulary = open_checkpoint(folder).config["vocab_size"]
    return torch.randint(0, vocabulary, (windows, length), generator=torch.Generator().manual_seed(1))


def streamed(
    folder: Path, ids: Tensor, *, workers: int = 1, devices: tuple[str, ...] = ("cpu",)
) -> tuple[list[Tensor], list[Recorder]]:
    """The hidden states before the first and after every layer, and what an observer of each layer saw."""
    checkpoint = open_checkpoint(folder)
    with closing(WeightReader(checkpoint)) as reader:
        states = [embed(reader, ids)]
        observers = []
        for layer in range(text_config(checkpoint.config)["num_hidden_layers"]):
            observers.append(Recorder())
            states.append(DecoderLayer(reader, layer, devices, workers).run(states[-1], observers[-1]))
    return states, observers


def same(states: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(state, other) for state, other in zip(states, others, strict=True))


def peak_memory(folder: Path, *, experts: int) -> int:
    """Peak memory in bytes of a process that runs one MoE layer of small experts."""
    make_k2_shaped(folder, shape=replace(SMALL_SHAPE, experts=experts, dense_layers=0))
    code = (
        "import sys, torch; from pathlib import Path\n"
        "from k2convert.checkpoint.index import open_checkpoint\n"
        "from k2convert.forward.decoder import DecoderLayer, embed\n"
        "from k2convert.forward.weights import WeightReader\n"
        "from k2convert.machine import peak_bytes\n"
        "reader = WeightReader(open_checkpoint(Path(sys.argv[1])))\n"
        "ids = torch.arange(1024).view(2, 512) % 64\n"
        "DecoderLayer(reader, 0, workers=2).run(embed(reader, ids))\n"
        "print(peak_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    return int(done.stdout)


def assert_equals_transformers(folder: Path, ids: Tensor) -> None:
    """Hidden states within float noise, which differs between processors, routing exactly. A tie may have any order."""
    ours, observers = streamed(folder, ids)
    theirs, _, routings = transformers_states(folder, ids)
    assert torch.equal(ours[0], theirs[0])
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=5e-6 * float(other.abs().max()))
    for layer, (experts, weights) in routings.items():
        routing = observers[layer].routings[0]
        order = routing.experts.argsort(dim=-1)
        their_order = experts.argsort(dim=-1)
        assert torch.equal(routing.experts.gather(1, order), experts.gather(1, their_order))
        assert torch.allclose(routing.weights.gather(1, order), weights.gather(1, their_order), rtol=1e-4)


def test_hidden_states_after_every_layer_are_those_of_transformers(tiny: Path, trained: Path, tmp_path: Path) -> None:
    ids = token_ids(tiny, windows=3, length=96)
    assert_equals_transformers(tiny, ids)
    assert_equals_transformers(trained, ids)
    assert not torch.equal(streamed(tiny, ids)[0][1], streamed(trained, ids)[0][1]), "yarn changes the attention"
    grouped_queries = with_grouped_queries(tiny, tmp_path / "gqa")
    assert_equals_transformers(grouped_queries, token_ids(grouped_queries, windows=2, length=48))


def test_the_wrapped_model_gives_the_same_bytes(tiny: Path, k25: Path) -> None:
    ids = token_ids(tiny, windows=2, length=32)
    assert same(streamed(tiny, ids)[0], streamed(k25, ids)[0])


def test_bytes_do_not_depend_on_workers_or_on_how_work_is_dealt_out(tiny: Path) -> None:
    ids = token_ids(tiny, windows=5, length=64)
    once = streamed(tiny, ids)[0]
    assert same(once, streamed(tiny, ids, workers=3)[0])
    assert same(once, streamed(tiny, ids, workers=2, devices=("cpu", "cpu"))[0])


def test_an_observer_sees_experts_in_order_then_the_output(tiny: Path) -> None:
    ids = token_ids(tiny, windows=2, length=64)
    states, observers = streamed(tiny, ids)
    inputs = transformers_states(tiny, ids).inputs
    for layer, observer in enumerate(observers):
        order = [mlp.expert for mlp in observer.experts]
        assert order == ([0] if layer == 0 else [*sorted(e for e in order if e is not None), None])
        (after,) = observer.outputs
        assert torch.equal(after.view(states[0].shape), states[layer + 1])
        assert torch.allclose(observer.inputs[0].view(states[0].shape), inputs[layer], rtol=1e-4, atol=1e-5)


def test_a_dense_mlp_is_read_once_and_takes_tokens_in_pieces(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = WeightReader.read_source
    monkeypatch.setattr(
        WeightReader, "read_source", lambda reader, module: (read.append(module), original(reader, module))[1]
    )
    ids = token_ids(tiny, windows=DENSE_PIECE_TOKENS // 512 + 1, length=512)
    with closing(WeightReader(open_checkpoint(tiny))) as reader:
        layer = DecoderLayer(reader, 0, workers=2)
        hidden = embed(reader, ids)
        observer = Recorder()
        layer.run(hidden, observer)
        for windows in hidden.split(2):
            layer.run(windows)
    assert [mlp.tokens.numel() for mlp in observer.experts] == [DENSE_PIECE_TOKENS, 512]
    assert torch.equal(torch.cat([mlp.tokens for mlp in observer.experts]), torch.arange(ids.numel()))
    assert read == [f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]


def test_token_ids_outside_the_vocabulary_are_refused(tiny: Path) -> None:
    with closing(WeightReader(open_checkpoint(tiny))) as reader:
        for wrong in (-1, 2048):
            with pytest.raises(CalibrationError, match=f"token id {wrong} is outside the vocabulary of 2,048 tokens"):
                embed(reader, torch.tensor([[0, wrong, 5]]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_attention_heads": 8}, r"has shape \[.*\], but config.json makes it"),
        ({"q_lora_rank": None}, r"has no self_attn\.q_"),
        ({"rope_scaling": {"type": "unheard of"}}, "transformers cannot build the attention"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"kv_lora_rank": -3}, "transformers cannot build the attention"),
    ],
)
def test_a_config_that_does_not_fit(tiny: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "odd"))
    edit_config(folder, **change)
    with closing(WeightReader(open_checkpoint(folder))) as reader, pytest.raises(K2ConvertError, match=message):
        DecoderLayer(reader, 1)


@pytest.mark.slow
def test_hidden_states_of_smollm2_are_those_of_transformers(tmp_path: Path) -> None:
    from scripts.evaluation.smollm2 import make_smollm2

    folder = make_smollm2(tmp_path)
    assert_equals_transformers(folder, token_ids(folder, windows=4, length=256))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_experts(tmp_path: Path) -> None:
    few, many = (peak_memory(tmp_path / str(experts), experts=experts) for experts in (8, 512))
    assert many < few + 32e6, "512 experts are 113 MB"
