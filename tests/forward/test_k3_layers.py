"""Kimi K3's layers are Moonshot's own network, its linear attention transformers', and no mistake stays unseen."""

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from kimi_k3_network import NetworkRun, make_lively_k3, run_network
from torch import Tensor

from k2convert.checkpoint.index import open_checkpoint
from k2convert.errors import K2ConvertError
from k2convert.evaluation.head import Head
from k2convert.forward import delta, moe, residual
from k2convert.forward.decoder import DecoderLayer, embed
from k2convert.forward.weights import WeightReader
from k2convert.models import read_architecture
from k2convert.models.names import block_starts
from scripts.fixture_maker.damage import edit_json
from tests.forward.observers import Recorder

pytest.importorskip("llmcompressor")
pytestmark = pytest.mark.usefixtures("one_thread")


class Streamed(NamedTuple):
    logits: Tensor
    states: list[Tensor]
    observers: list[Recorder]


@torch.no_grad()
def streamed(folder: Path, ids: Tensor, *, workers: int = 1, devices: tuple[str, ...] = ("cpu",)) -> Streamed:
    """Logits, the sum p before and after every layer, and what an observer of each layer saw."""
    checkpoint = open_checkpoint(folder)
    architecture = read_architecture(checkpoint)
    with closing(WeightReader(checkpoint)) as reader:
        states = [embed(reader, ids)]
        observers = []
        for layer in range(architecture.num_layers):
            blocks = [states[start] for start in block_starts(layer, architecture.residual_block)]
            observers.append(Recorder())
            states.append(DecoderLayer(reader, layer, devices, workers).run(states[-1], observers[-1], blocks))
        head = Head(reader)
        blocks = [states[start] for start in block_starts(architecture.num_layers, architecture.residual_block)]
        logits = head.rows(0, head.vocabulary).linear(head.normed(head.mixed(*blocks, states[-1])).flatten(0, 1))
    return Streamed(logits.view(*ids.shape, -1), states, observers)


def token_ids(*, windows: int = 2, length: int = 80) -> Tensor:
    return torch.randint(0, 64, (windows, length), generator=torch.Generator().manual_seed(1))


def largest_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def assert_same_routing(ours: Streamed, theirs: NetworkRun) -> None:
    for layer, (experts, weights) in theirs.routings.items():
        routing = ours.observers[layer].routings[0]
        assert routing is not None
        order, other = routing.experts.argsort(dim=-1), experts.argsort(dim=-1)
        assert torch.equal(routing.experts.gather(1, order), experts.gather(1, other))
        assert torch.allclose(routing.weights.gather(1, order), weights.gather(1, other), rtol=1e-4)


@pytest.fixture(scope="module")
def lively(k3_lively: Path) -> Path:
    return k3_lively


@pytest.fixture(scope="module")
def theirs(lively: Path) -> NetworkRun:
    return run_network(lively, token_ids())


def test_logits_and_routing_are_those_of_moonshots_code(lively: Path, theirs: NetworkRun) -> None:
    ours = streamed(lively, token_ids())
    assert largest_error(ours.logits, theirs.logits) < 1e-4
    for mine, other in zip(ours.states[1:], theirs.states, strict=True):
        assert largest_error(mine, other) < 1e-4
    assert_same_routing(ours, theirs)


@pytest.mark.parametrize("kind", ["one block", "published values"])
def test_other_small_models_are_those_of_moonshots_code(kind: str, k3_tiny: Path, tmp_path: Path) -> None:
    folder = k3_tiny if kind == "published values" else make_lively_k3(tmp_path / "k3", block=12)
    ids = token_ids(windows=1, length=33)
    ours, theirs = streamed(folder, ids), run_network(folder, ids)
    assert largest_error(ours.logits, theirs.logits) < 1e-4
    assert_same_routing(ours, theirs)


def test_bytes_do_not_depend_on_workers_or_devices(lively: Path) -> None:
    ids = token_ids(windows=3, length=40)
    once = streamed(lively, ids).logits
    assert torch.equal(once, streamed(lively, ids, workers=3).logits)
    assert torch.equal(once, streamed(lively, ids, workers=2, devices=("cpu", "cpu")).logits)


def heads_of(tokens: int, *, heads: int = 2, size: int = 16) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, log decays down to -5, and beta of a window."""
    random = torch.Generator().manual_seed(tokens)
    q, k, v, f = (torch.randn(heads, tokens, size, generator=random) for _ in range(4))
    return (
        delta.unit(q) * size**-0.5,
        delta.unit(k),
        v,
        -5 * torch.sigmoid(3 * f - 2),
        torch.rand(heads, tokens, generator=random),
    )


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 2048])
def test_the_delta_rule_is_that_of_transformers_and_of_its_definition(tokens: int) -> None:
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear

    q, k, v, decays, beta = heads_of(tokens)
    ours = delta.delta_rule(q, k, v, decays, beta)
    theirs = [x.transpose(0, 1)[None] for x in (q * q.shape[-1] ** 0.5, k, v)]
    others = {"g": decays.transpose(0, 1)[None], "beta": beta.T[None], "initial_state": None}
    for function in (kimi_linear.chunk_kimi_delta_attention, kimi_linear.recurrent_kimi_delta_attention):
        output, _ = function(*theirs, **others, output_final_state=False)
        assert largest_error(ours, output[0].transpose(0, 1)) < 1e-5
    state = torch.zeros(2, 16, 16)
    for t in range(min(tokens, 65)):
        state = state * decays[:, t, :, None].exp()
        change = beta[:, t, None] * (v[:, t] - (state.transpose(1, 2) @ k[:, t, :, None])[..., 0])
        state = state + k[:, t, :, None] * change[:, None]
        assert torch.allclose((state.transpose(1, 2) @ q[:, t, :, None])[..., 0], ours[:, t], atol=1e-5)


def test_a_channel_that_forgets_at_once_overflows_nothing() -> None:
    q, k, v, _, beta = heads_of(64)
    output = delta.delta_rule(q, k, v, torch.full_like(k, -1e4), beta)
    assert torch.allclose(output, (q * k).sum(-1, keepdim=True) * beta[..., None] * v, atol=1e-6)


def test_kda_without_the_switches_of_k3_is_that_of_transformers(lively: Path) -> None:
    """A softplus gate, and a low-rank output gate, whose product is the weight of a full one."""
    from transformers import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    reader = WeightReader(open_checkpoint(lively))
    stem = "language_model.model.layers.1.self_attn"
    text = reader.checkpoint.config["text_config"]
    linear = text["linear_attn_config"] | {"gate_lower_bound": None}
    ours = delta.DeltaAttention(reader, stem, linear, device="cpu")
    heads, size = linear["num_heads"], linear["head_dim"]
    config = KimiLinearConfig(
        hidden_size=512, linear_num_heads=heads, linear_head_dim=size, linear_conv_kernel_dim=4, rms_norm_eps=1e-5,
        hidden_act="silu", num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    module: Any = KimiLinearDeltaAttention(config, 0).eval()
    values = {name: reader.read(f"{stem}.{name}.weight").float() for name in ("q_proj", "k_proj", "v_proj", "b_proj")}
    state = {f"{name}.weight": value for name, value in values.items()}
    state |= {f"{name}.weight": reader.read(f"{stem}.{name}.weight").float() for name in ("o_proj", "o_norm")}
    state["conv1d.weight"] = torch.cat([reader.read(f"{stem}.{name}_conv1d.weight") for name in "qkv"])
    gate_a, gate_b = torch.randn(size, 512) / 22, torch.randn(heads * size, size) / 5
    state |= {"g_a_proj.weight": gate_a, "g_b_proj.weight": gate_b}
    ours._linears["g_proj"] = delta_weight(gate_b @ gate_a)
    for name, tensor in module.named_parameters():
        if name.startswith("forget_gate"):
            leaf = name.removeprefix("forget_gate.")
            stored = next(n for n in reader.checkpoint.tensors if n.startswith(stem) and n.endswith(leaf))
            state[name] = reader.read(stored).float().flatten()[: tensor.numel()].view(tensor.shape)
    module.load_state_dict(state)
    x = torch.randn(70, 512, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        assert largest_error(ours(x), module(x[None])[0]) < 1e-5
    reader.close()


def delta_weight(values: Tensor) -> Any:
    from k2convert.forward.weights import DenseWeight

    return DenseWeight(values)


def without_gate(attention: residual.GatedMla) -> residual.GatedMla:
    attention._linears.pop("g_proj", None)
    return attention


def begun_late(attention: residual.ResidualAttention) -> residual.ResidualAttention:
    attention._begins_block = not attention._begins_block
    return attention


MISTAKES: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "the sign of a decay": (
        delta.DeltaAttention, "_log_decays", lambda right: lambda self, f: -0.1 * right(self, f)
    ),
    "keys that are not normalized": (delta, "unit", lambda _: lambda x: x),
    "a convolution that reads the next token": (
        delta, "_convolve", lambda right: lambda x, kernel: right(x, kernel).roll(-1, 0)
    ),
    "no silu after the convolution": (
        delta, "_convolve", lambda _: lambda x, kernel: torch.nn.functional.conv1d(
            torch.nn.functional.pad(x.T, (3, 0))[None], kernel, groups=x.shape[1]
        )[0].T,
    ),
    "a mixture without the norm": (
        residual.Mixture, "__call__", lambda _: lambda self, *states: sum(
            share * state for share, state in zip(
                torch.stack([(self.weight * state).sum(-1, keepdim=True) for state in states]).softmax(0), states,
                strict=True,
            )
        ),
    ),
    "a mixture without the blocks": (
        residual.Mixture, "__call__", lambda right: lambda self, *states: right(self, states[-1])
    ),
    "A_log from its other end": (
        delta.DeltaAttention, "_log_decays", lambda right: lambda self, f: right(self, f.flip(-1)).flip(-1)
    ),
    "a block that begins one layer later": (
        residual.ResidualAttention, "__call__", lambda right: lambda self, p, *b: right(begun_late(self), p, *b)
    ),
    "a latent sum that is not normed": (moe.LatentColumns, "leave", lambda _: lambda self, y: self.up.linear(y)),
    "SiTU without bounds": (
        moe, "situ_and_multiply", lambda _: lambda gate, up, **_betas: moe.silu_and_multiply(gate, up)
    ),
    "MLA without its gate": (residual.GatedMla, "__call__", lambda right: lambda self, x: right(without_gate(self), x)),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(
    mistake: str, lively: Path, theirs: NetworkRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, wrong = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, wrong(getattr(owner, name)))
    assert largest_error(streamed(lively, token_ids()).logits, theirs.logits) > 1e-3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"full_attn_layers": [3, 4], "kda_layers": [1, 2, 5]}, "is missing|has shape"),  # counted from 0
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_heads": 1}, "has shape .* but config.json makes it"),
        ({"gate_lower_bound": 5.0}, "gate_lower_bound is 5.0"),
        ({"use_full_rank_gate": False}, "use_full_rank_gate is False"),
    ],
)
def test_a_config_of_which_no_attention_can_be_computed(
    change: dict[str, Any], says: str, lively: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(lively, tmp_path / "odd"))
    edit_json(folder / "config.json", lambda config: config["text_config"]["linear_attn_config"].update(change))
    with pytest.raises(K2ConvertError, match=says):
        streamed(folder, token_ids(windows=1, length=4))
