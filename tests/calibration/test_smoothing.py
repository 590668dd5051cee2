"""The search of smoothing exponents: its error is as defined, it only goes down, and every power of two is exact."""

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from k2convert.calibration.smoothing import (
    SAMPLED_TOKENS,
    LayerAccumulator,
    Proxy,
    descend,
    exactly_scalable,
    find_exponents,
    find_scaled_tensors,
    read_gate_up,
)
from k2convert.check.reference_layers import draw_hidden_states
from k2convert.checkpoint.index import open_checkpoint
from k2convert.checkpoint.reader import ShardReader
from k2convert.forward.decoder import DecoderLayer
from k2convert.forward.moe import quantize_activations
from k2convert.forward.weights import WeightReader
from k2convert.models.projections import load_projection
from k2convert.quantize.formats.bf16 import Bf16Weight, bf16_bits, scale_bits, scale_fp32
from scripts.fixture_maker.damage import edit_tensor
from tests.forward.observers import Recorder

LAYER = 1
STEM = f"model.layers.{LAYER}"
HIDDEN = 256


def random_weight(rows: int, columns: int, *, seed: int) -> Bf16Weight:
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    return Bf16Weight(bf16_bits(values * np.float32(0.02)))


def best_block_errors(block: np.ndarray) -> np.ndarray:
    """The squared errors of 16 numbers under the E4M3 step with the least sum, nearest E2M1 values."""
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    steps = np.array([mantissa * 2.0**exponent for exponent in range(-24, 2) for mantissa in range(8, 16)])
    distances = np.abs(np.abs(block)[None, :, None] - grid * steps[:, None, None])
    errors = distances.min(axis=2) ** 2
    return errors[errors.sum(axis=1).argmin()]


def outlier_inputs(columns: int, *, seed: int = 3) -> Tensor:
    """Inputs of 256 tokens in which some channels are much larger than their neighbors."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(0.7 * torch.randn(columns, generator=generator))
    sizes[::37] *= 12
    return torch.randn(256, columns, generator=generator) * sizes


def proxy_of(weight: Bf16Weight) -> Proxy:
    inputs = outlier_inputs(weight.shape[1])
    squares = np.square(weight.values().astype(np.float64)).mean(axis=0)
    return Proxy(inputs, inputs.square().mean(dim=0).numpy(), squares, weight)


def test_the_proxy_is_its_definition() -> None:
    weight = random_weight(6, 64, seed=1)
    proxy = proxy_of(weight)
    exponents = np.random.default_rng(5).integers(-2, 3, 64).astype(np.int8)
    s = 2.0 ** exponents.astype(np.float64)
    x = proxy.inputs.numpy().astype(np.float64)
    rounded = quantize_activations(torch.tensor(x * s, dtype=torch.float32), 1.0).numpy().astype(np.float64)
    squares = (proxy.mean_square + 1e-4 * proxy.mean_square.mean(dtype=np.float64)) * s**2
    errors = np.zeros((4, 16))
    for row in weight.values().astype(np.float64) / s:
        errors += [best_block_errors(block) for block in row.reshape(4, 16)]
    channels = proxy.column_squares / s**2 * ((s * x - rounded) ** 2).mean(axis=0)
    channels += 0.6 * squares * errors.reshape(-1) / 6
    np.testing.assert_allclose(proxy.errors(exponents), channels.reshape(4, 16).sum(axis=1), rtol=1e-5)


def test_the_search_lowers_the_error_of_every_block_it_changes() -> None:
    proxy = proxy_of(random_weight(96, 64, seed=4))
    free = np.ones(64, dtype=np.bool_)
    free[37] = False
    exponents = descend(proxy, free=free)
    before = proxy.errors(np.zeros(64, np.int8))
    after = proxy.errors(exponents)
    changed = exponents.reshape(4, 16).any(axis=1)
    assert changed.any()
    assert (after[changed] < before[changed] * 0.9995).all()
    np.testing.assert_array_equal(after[~changed], before[~changed])
    assert exponents[37] == 0, "a channel that is not free"
    assert after.sum() < 0.9 * before.sum()
    assert np.abs(exponents).max() <= 2, "one pass"


def test_the_same_seed_finds_the_same_exponents_with_any_number_of_threads(tiny: Path) -> None:
    inputs = draw_hidden_states(torch.ones(HIDDEN), config={}, layer=LAYER, tokens=256)
    mean_square = inputs.square().mean(dim=0).numpy()
    before = torch.get_num_threads()
    exponents = []
    with closing(WeightReader(open_checkpoint(tiny))) as reader:
        try:
            for threads in (1, 2):
                torch.set_num_threads(threads)
                exponents.append(find_exponents(reader, LAYER, inputs=inputs, mean_square=mean_square, seed=7))
        finally:
            torch.set_num_threads(before)
    np.testing.assert_array_equal(*exponents)
    assert exponents[0].any()


def test_rows_are_the_sources_and_drawn_by_the_seed(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    tensors = find_scaled_tensors(checkpoint, LAYER)
    assert len(tensors.experts) == 32
    assert len(tensors.shared) == 2
    with ShardReader(checkpoint.path) as shards:
        (squares, first), (same, again), (_, other) = (read_gate_up(shards, tensors, seed=seed) for seed in (1, 1, 2))
        whole = np.concatenate([load_projection(shards.read, p).values() for p in tensors.experts])
    np.testing.assert_array_equal(squares, same)
    # The tiny checkpoint has fewer rows than are read of a large one, so all of them count.
    np.testing.assert_allclose(squares, np.square(whole.astype(np.float64)).mean(axis=0), rtol=1e-12)
    rows = {row.tobytes() for row in bf16_bits(whole)}
    for sampled in (first, other):
        assert sampled.shape == (96, HIDDEN)
        assert all(row.tobytes() in rows for row in sampled.bits)
    assert first.bits.tobytes() == again.bits.tobytes()
    assert first.bits.tobytes() != other.bits.tobytes()


def test_the_tensors_of_a_wrapped_model_are_found(tiny: Path, k25: Path) -> None:
    """K2.5 has the same layers under another prefix."""
    by_max, wrapped = (find_scaled_tensors(open_checkpoint(folder), LAYER) for folder in (tiny, k25))
    assert wrapped.norm.name == f"language_model.{by_max.norm.name}"
    assert [t.name for t in wrapped.routers] == [f"language_model.{t.name}" for t in by_max.routers]
    for prefixed, plain in ((wrapped.experts, by_max.experts), (wrapped.shared, by_max.shared)):
        assert {p.module for p in prefixed} == {f"language_model.{p.module}" for p in plain}


def plant(values: Tensor, value: float, *, row: int | None = 2, column: int = 40) -> Tensor:
    values[... if row is None else row, column] = value
    return values


SMALLEST = 2.0**-126
LARGEST = 2.0**127
NORM = f"{STEM}.post_attention_layernorm.weight"
ROUTER = f"{STEM}.mlp.gate.weight"
SHARED = f"{STEM}.mlp.shared_experts.up_proj.weight"
SCALES = f"{STEM}.mlp.experts.5.gate_proj.weight_scale"


@pytest.mark.quick(8)
@pytest.mark.parametrize(
    ("name", "change", "unscaled"),
    [
        (NORM, lambda t: plant(t, 0.0, row=None), [40]),
        (NORM, lambda t: plant(t, -0.0, row=None), [40]),
        (NORM, lambda t: plant(t, LARGEST / 8, row=None), [40]),
        (NORM, lambda t: plant(t, LARGEST / 16, row=None), []),
        (ROUTER, lambda t: plant(t, 8 * SMALLEST), [40]),
        (ROUTER, lambda t: plant(t, -8 * SMALLEST), [40]),
        (ROUTER, lambda t: plant(t, 16 * SMALLEST), []),
        (ROUTER, lambda t: plant(t, SMALLEST / 8), [40]),
        (ROUTER, lambda t: plant(t.float(), 8 * SMALLEST), [40]),
        (ROUTER, lambda t: plant(t.float(), 16 * SMALLEST), []),
        (ROUTER, lambda t: t.half(), list(range(HIDDEN))),
        (SHARED, lambda t: plant(t, -LARGEST), [40]),
        (SHARED, lambda t: plant(t, 0.0), []),
        (SCALES, lambda t: plant(t, 8 * SMALLEST, column=3), list(range(96, 128))),
        (SCALES, lambda t: plant(t, 2.0**121, column=3), list(range(96, 128))),
        (SCALES, lambda t: plant(t, 2.0**120, column=3), []),
        (SCALES, lambda t: plant(t, 0.0, column=3), []),
        (f"{STEM}.mlp.shared_experts.down_proj.weight", lambda t: plant(t, LARGEST), []),
        ("model.layers.2.mlp.gate.weight", lambda t: plant(t, LARGEST), []),
    ],
)
def test_a_channel_that_cannot_be_scaled_exactly_is_kept(
    name: str, change: Callable[[Tensor], Tensor], unscaled: list[int], tiny: Path, tmp_path: Path
) -> None:
    """Everything else can be: the functions that scale a checkpoint accept 2^-4 and 2^4 on every other channel."""
    folder = Path(shutil.copytree(tiny, tmp_path / "planted"))
    edit_tensor(folder, name, change)
    checkpoint = open_checkpoint(folder)
    tensors = find_scaled_tensors(checkpoint, LAYER)
    with ShardReader(checkpoint.path) as shards:
        usable = exactly_scalable(shards, tensors)
        assert np.flatnonzero(~usable).tolist() == unscaled
        for exponent in (-4, 4):
            exponents = np.where(usable, exponent, 0).astype(np.int8)
            for tensor, steps in ((tensors.norm, exponents), (tensors.routers[0], -exponents)):
                data = shards.read(tensor)
                if tensor.dtype == "BF16":
                    scale_bits(data.view(np.uint16).reshape(-1, HIDDEN), steps, name=tensor.name)
                elif tensor.dtype == "F32":
                    scale_fp32(data.view(np.float32).reshape(-1, HIDDEN), steps, name=tensor.name)
            for projection in (*tensors.experts, *tensors.shared):
                load_projection(shards.read, projection).divide_columns(exponents, name=projection.module)


def test_nothing_is_scaled_by_fewer_tokens_than_the_search_takes(tiny: Path, tmp_path: Path) -> None:
    outliers = torch.ones(HIDDEN).index_fill_(0, torch.arange(0, HIDDEN, 16), 32.0)
    folder = Path(shutil.copytree(tiny, tmp_path / "outliers"))
    edit_tensor(folder, NORM, lambda t: (t * outliers).to(t.dtype))
    with closing(WeightReader(open_checkpoint(folder))) as reader:
        layer = DecoderLayer(reader, LAYER)
        for tokens in (SAMPLED_TOKENS - 1, SAMPLED_TOKENS):
            observer = Recorder()
            layer.run(torch.randn(1, tokens, HIDDEN, generator=torch.Generator().manual_seed(0)), observer)
            accumulator = LayerAccumulator(LAYER, num_experts=16, seed=0)
            [inputs], [routing] = observer.inputs, observer.routings
            assert routing is not None
            accumulator.add(inputs, routing, torch.ones(tokens, dtype=torch.float64))
            exponents = accumulator.find_exponents(reader)
            assert (exponents is None) == (tokens < SAMPLED_TOKENS)
