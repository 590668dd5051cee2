"""Statistics of a layer are what captured activations of transformers' own network give, computed straightforwardly."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from grouped_queries import with_grouped_queries
from safetensors.torch import load_file, save_file
from statistics_makers import layers_by_pass
from torch import Tensor
from whole_models import whole_model

from k2convert.calibration.accumulate import LayerAccumulator
from k2convert.calibration.statistics import LayerStatistics
from k2convert.checkpoint.index import open_checkpoint
from k2convert.forward.decoder import DecoderLayer, embed
from k2convert.forward.weights import WeightReader
from scripts.evaluation.models import source_mlps
from tests.forward.observers import NetworkStates, transformers_states

pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")


def captured(folder: Path, ids: Tensor) -> list[dict[str, np.ndarray]]:
    """The same arrays from hooks on the built network, in FP64."""
    seen = transformers_states(folder, ids)
    mlps = source_mlps(folder)
    return [straightforward(seen, mlps, number) for number in range(len(seen.inputs))]


def straightforward(seen: NetworkStates, mlps: dict[str, Any], number: int) -> dict[str, np.ndarray]:
    x, h = (states.flatten(0, 1).double() for states in (seen.inputs[number], seen.states[number + 1]))
    stem = f"model.layers.{number}.mlp"
    weights = 1 / h.square().sum(dim=1)
    weights /= weights.mean()

    def inner(name: str, tokens: Tensor) -> tuple[Tensor, Tensor]:
        gate, up, down = (getattr(mlps[name], p).weight.decode().double() for p in ("gate", "up", "down"))
        z = torch.nn.functional.silu(x[tokens] @ gate.T) * (x[tokens] @ up.T)
        return z, (z @ down.T).norm(dim=1)

    found = {"gate_up.mean_square": (weights[:, None] * x.square()).mean(dim=0), "gate_up.amax": x.abs().max()[None]}
    everything = torch.arange(x.shape[0])
    if stem in mlps:
        routed = [(everything, torch.ones(x.shape[0]).double())]
        names = [stem]
    else:
        experts, gates = seen.routings[number]
        names = [f"{stem}.experts.{e}" for e in range(sum(k.startswith(f"{stem}.experts.") for k in mlps))]
        places = [torch.where(experts == e) for e in range(len(names))]
        routed = [(tokens, gates[tokens, place].double()) for tokens, place in places]
        z, _ = inner(f"{stem}.shared_experts", everything)
        found["shared_down.mean_square"] = (weights[:, None] * z.square()).mean(dim=0)
        found["shared_down.amax"] = z.abs().max()[None]
    rows = []
    amax = []
    saliency = []
    for name, (tokens, p) in zip(names, routed, strict=True):
        z, norms = inner(name, tokens)
        rows.append((weights[tokens, None] * p[:, None] ** 2 * z**2).sum(dim=0) / max(1, tokens.numel()))
        amax.append(z.abs().amax() if z.numel() else torch.tensor(0.0).double())
        saliency.append((p * norms).sum() / max(1, tokens.numel()))
    found |= {"down.mean_square": torch.stack(rows), "down.amax": torch.stack(amax), "saliency": torch.stack(saliency)}
    found["tokens"] = torch.tensor([tokens.numel() for tokens, _ in routed])
    found["router_weight"] = torch.stack([p.sum() for _, p in routed]) / x.shape[0]
    return {name: array.numpy() for name, array in found.items()}


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 500, (4, 64), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def found(tiny: Path, ids: Tensor) -> list[LayerStatistics]:
    return layers_by_pass(tiny, ids, num_layers=4, chunk=3)[1]


def test_statistics_equal_a_straightforward_computation(found: list[LayerStatistics], tiny: Path, ids: Tensor) -> None:
    expected = captured(tiny, ids)
    assert len(found) == len(expected) == 4
    for layer, arrays in zip(found, expected, strict=True):
        others = {"smoothing_exponents", "imatrix", "kv.amax", "kv.subnormal_share", "kv.saturated_share"}
        assert layer.arrays().keys() == {*arrays, *others}
        for name, array in arrays.items():
            np.testing.assert_allclose(layer.arrays()[name], array, rtol=2e-4, atol=1e-9, err_msg=name)
        np.testing.assert_array_equal(layer.tokens, arrays["tokens"])


def test_the_norm_is_known_by_its_bytes(found: list[LayerStatistics], tiny: Path) -> None:
    with closing(WeightReader(open_checkpoint(tiny))) as reader:
        for number, layer in enumerate(found):
            raw = reader.raw(f"model.layers.{number}.post_attention_layernorm.weight")
            assert layer.norm_digest == blake3(raw.numpy().tobytes()).hexdigest()


def test_statistics_are_the_same_bytes_with_any_number_of_threads(
    found: list[LayerStatistics], tiny: Path, ids: Tensor
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2 if before == 1 else 1)
    try:
        _, again = layers_by_pass(tiny, ids, num_layers=4, chunk=3, workers=2)
    finally:
        torch.set_num_threads(before)
    for one, two in zip(found, again, strict=True):
        for name, array in one.arrays().items():
            np.testing.assert_array_equal(array, two.arrays()[name], err_msg=name, strict=True)


def test_a_chunk_that_did_not_end_does_not_count(tiny: Path, ids: Tensor) -> None:
    """A window may turn out to be unusable at the end of a chunk, which is then begun again without it."""

    class StopError(Exception):
        pass

    class Interrupting(LayerAccumulator):
        def output(self, h_TK: Tensor) -> None:
            raise StopError

    with closing(WeightReader(open_checkpoint(tiny))) as reader:
        layer = DecoderLayer(reader, 1)
        hidden = embed(reader, ids)
        clean, again = (kind(reader, 1, seed=0, ids=ids.numpy()) for kind in (LayerAccumulator, Interrupting))
        layer.run(hidden[:2], clean)
        with pytest.raises(StopError):
            layer.run(hidden[:3], again)
        again.__class__ = LayerAccumulator
        layer.run(hidden[:2], again)
        np.testing.assert_equal(again.finish().arrays(), clean.finish().arrays())


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["MLA", "grouped queries", "loud keys"])
def test_what_a_cache_holds_is_what_is_in_that_of_transformers(
    kind: str, trained: Path, ids: Tensor, tmp_path: Path
) -> None:
    folder = trained if kind == "MLA" else with_grouped_queries(trained, tmp_path / "gqa")
    if kind == "loud keys":
        (shard,), name = folder.glob("*.safetensors"), "model.layers.1.self_attn.k_norm.weight"
        tensors = load_file(shard)
        save_file(tensors | {name: tensors[name] * 256}, shard, {"format": "pt"})
    from transformers import DynamicCache

    network: Any = whole_model(folder).network
    with torch.inference_mode():
        cached = network(ids, past_key_values=DynamicCache(), use_cache=True).past_key_values
    _, layers = layers_by_pass(folder, ids, num_layers=2, chunk=3, workers=2)
    for layer, parts in zip(layers, cached.layers, strict=False):
        magnitudes = [part.abs().numpy() for part in (parts.keys, parts.values)]
        assert [part.shape[-1] for part in magnitudes] == ([64, 16] if kind == "MLA" else [32, 32])
        expected = {
            "kv.amax": [part.max() for part in magnitudes],
            "kv.subnormal_share": [((part > 0) & (part < 2**-6)).mean() for part in magnitudes],
            "kv.saturated_share": [(part > 448).mean() for part in magnitudes],
        }
        for name, values in expected.items():
            np.testing.assert_allclose(layer.arrays()[name], values, rtol=1e-3, atol=1e-5, err_msg=name)
    assert kind != "loud keys" or (layers[1].kv_saturated_share is not None and layers[1].kv_saturated_share[0] > 0.05)


def test_every_tensor_is_where_a_device_needs_it(tiny: Path) -> None:
    """Two devices that are as strict as GPUs give the statistics of the CPU."""
    from tests.forward import shadow_device

    ids = torch.randint(0, 2048, (3, 32), generator=torch.Generator().manual_seed(1))
    expected, of_cpu = layers_by_pass(tiny, ids, num_layers=2, chunk=2, workers=2)
    devices = ("shadow:0", "shadow:1")
    hidden, of_devices = layers_by_pass(tiny, ids, num_layers=2, chunk=2, workers=2, devices=devices)
    assert min(shadow_device.calls[device] for device in devices) > 100
    assert hidden.device.type == "cpu"
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
    for here, there in zip(of_cpu, of_devices, strict=True):
        assert np.array_equal(here.tokens, there.tokens)
        for name in ("gate_up_mean_square", "down_mean_square", "down_amax", "saliency"):
            np.testing.assert_allclose(getattr(there, name), getattr(here, name), rtol=1e-4)


def test_the_device_of_the_tests_refuses_what_a_gpu_refuses() -> None:
    from tests.forward import shadow_device  # noqa: F401

    here = torch.ones(3, device="shadow:0")
    there = torch.ones(3, device="shadow:1")
    for wrong in (lambda: here + there, lambda: here + torch.ones(3), lambda: here.numpy()):
        with pytest.raises((RuntimeError, TypeError)):
            wrong()
