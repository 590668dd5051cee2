"""The layer pass of rule `gptq`: both streams, the codes of every layer, few and odd tokens, stopping and going on."""

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from panel_reference import ReferencePanels
from safetensors.torch import load_file

from k2convert.calibration.gptq_layer import MlpWeights, SourceProjection
from k2convert.calibration.gptq_pass import gptq_pass
from k2convert.calibration.layer_files import (
    Calibration,
    LayerResult,
    conversion_work,
    delete_quantized,
    read_layer,
    write_layer,
)
from k2convert.calibration.layer_tokens import Scratch
from k2convert.checkpoint.index import open_checkpoint
from k2convert.choices import RoleName
from k2convert.errors import PlanError
from k2convert.forward.decoder import DecoderLayer, embed
from k2convert.forward.layer_pass import LayerPart, LayerPass, LayerShards, PassText
from k2convert.forward.moe import Mlp
from k2convert.forward.weights import LinearLayer, WeightReader, exact_weight, nvfp4_weight
from k2convert.forward.work import PassJob, WorkFolder
from k2convert.models import detect_family
from k2convert.plan.recipe import Recipe
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.gptq.device_kernel import check_device
from k2convert.quantize.rules.mse import mse_global_scale, quantize_mse
from k2convert.records.calibration import GptqLayer
from k2convert.records.events import SILENT
from k2convert.text.windows import Windows, held_out, read_windows

Ids = NDArray[np.int64]
KINDS = ("gate", "up", "down")


def windows_of(source: Path, *, tokens: int, window: int) -> Ids:
    text = Path(__file__).resolve().parents[1] / "data" / "k2-tiny" / "calibration.txt"
    return read_windows([text], tokenizer=source, vocab_size=2048, tokens=tokens, window=window, seed=0).ids


def planned(source: Path, ids: Ids, *, workers: int = 1, chunk: int = 3, num_layers: int | None = None) -> LayerPass:
    checkpoint = open_checkpoint(source)
    architecture = detect_family(checkpoint).read_architecture(checkpoint.config, str(source))
    layers = num_layers or architecture.num_layers
    work = conversion_work(Path("unused"))
    return LayerPass(
        text=PassText(Windows(ids, (), (), ids.size, ids.shape[1], 0), chunk, ("cpu",), workers),
        num_layers=layers,
        hidden_size=architecture.hidden_size,
        work=work,
        job=PassJob({}, chunk, {}),
        shards=LayerShards([LayerPart(checkpoint, None, {})] * layers, work.downloads, 0, SILENT),
    )


def on(devices: tuple[str, ...], layer_pass: LayerPass) -> LayerPass:
    return replace(layer_pass, text=replace(layer_pass.text, devices=devices))


def passed(
    work: WorkFolder,
    layer_pass: LayerPass,
    *,
    smoothing: bool = True,
    roles: tuple[RoleName, ...] = ("experts",),
    check_stop: Callable[[], None] = lambda: None,
) -> WorkFolder:
    """Do what is left of a layer pass; the hidden states that a layer takes are kept as `NAME.kept`."""
    (work.folder / ".k2convert").mkdir(parents=True, exist_ok=True)
    work.begin(PassJob({}, 3, {}), events=SILENT)

    def save(layer: int, result: LayerResult) -> None:
        for path in (work.path("hidden", layer + 1), work.path("residual", layer + 1)):
            if path.exists():
                shutil.copy(path, path.with_suffix(".kept"))
        write_layer(work, layer, result)

    recipe = Recipe(name="gptq", rule="gptq", smoothing=smoothing, roles=roles)
    gptq_pass(replace(layer_pass, work=work), recipe, check_stop=check_stop, save=save)
    return work


def files_of(work: WorkFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(work.folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def tiny_ids(tiny: Path) -> Ids:
    return windows_of(tiny, tokens=1024, window=128)


@pytest.fixture(scope="module")
def tiny_pass(tiny: Path, tiny_ids: Ids, tmp_path_factory: pytest.TempPathFactory) -> WorkFolder:
    """A whole layer pass through the trained checkpoint: about 250 tokens an expert."""
    return passed(conversion_work(tmp_path_factory.mktemp("layer_pass")), planned(tiny, tiny_ids))


def states(path: Path) -> torch.Tensor:
    hidden = load_file(path.with_suffix(".kept"))["hidden_states"]
    assert hidden.dtype == torch.bfloat16
    return hidden.float()


def decoded(weight: Nvfp4Weight) -> LinearLayer:
    packed = torch.as_tensor(weight.packed)
    scales = torch.as_tensor(weight.block_scales)
    return LinearLayer(nvfp4_weight(packed, scales, weight.global_scale))


def decided(work: WorkFolder, layer: int) -> GptqLayer:
    gptq = read_layer(work, layer).gptq
    assert gptq is not None
    return gptq


@pytest.mark.slow
@pytest.mark.parametrize("layer", [1, 2])
def test_the_second_stream_is_what_the_converted_layer_gives(
    tiny: Path, tiny_ids: Ids, tiny_pass: WorkFolder, layer: int
) -> None:
    """The layer pass keeps the residual and updates it; here both layers are computed, the converted one by its codes.

    The streams share the INT4 model's states, which are rounded to BF16; what is lacking is rounded only once.
    """
    layer_pass = planned(tiny, tiny_ids)
    work = tiny_pass
    exponents = read_layer(work, layer).smoothing()
    factors = np.ones(layer_pass.hidden_size) if exponents is None else np.ldexp(1.0, exponents.astype(np.int32))
    with closing(WeightReader(open_checkpoint(tiny))) as reader, Calibration(work) as codes:
        decoder = DecoderLayer(reader, layer)
        hidden = states(work.path("hidden", layer))
        exact = decoder.run(hidden).flatten(0, 1)
        after, x, routing = decoder.attend(hidden - states(work.path("residual", layer)))
        result = after + decoder.shared_output(x)
        scaled = x * torch.as_tensor(factors.astype(np.float32))
        for expert in range(routing.scores.shape[1]):
            tokens, p = routing.tokens_of(expert)
            weights = [codes.converted(f"model.layers.{layer}.mlp.experts.{expert}.{k}_proj") for k in KINDS]
            assert weights[0].global_scale == weights[1].global_scale
            mlp = Mlp(*map(decoded, weights))
            result[tokens] += mlp(scaled[tokens]) * p[:, None]
    residual = states(work.path("residual", layer + 1)).flatten(0, 1)
    torch.testing.assert_close(exact - result, residual, rtol=2.0**-8, atol=1e-5 * float(exact.abs().max()))
    assert torch.equal(exact.bfloat16().float(), states(work.path("hidden", layer + 1)).flatten(0, 1))


def test_each_layer_gives_more_of_the_int4_layer_than_rule_mse(tiny_pass: WorkFolder) -> None:
    for layer in (1, 2, 3):
        gptq = decided(tiny_pass, layer)
        for errors in (gptq.fitted, gptq.held_out):
            assert errors.gptq_error < errors.mse_error
            assert (errors.inherited_error == 0) == (layer == 1), "only the first MoE layer has nothing before it"
    assert read_layer(tiny_pass, 0) == LayerResult(dropped=0), "a dense layer decides nothing"


@pytest.mark.parametrize("layer", [1, 2])
def test_the_held_out_error_is_that_of_the_streams_on_the_windows_that_are_kept_out(
    tiny_pass: WorkFolder, layer: int
) -> None:
    """The streams are equal before the first layer with experts."""
    assert not states(tiny_pass.path("residual", 1)).any()
    gptq = decided(tiny_pass, layer)
    exact, residual = (states(tiny_pass.path(kind, layer + 1)).double() for kind in ("hidden", "residual"))
    errors = residual.square().sum(dim=2) / exact.square().sum(dim=2)
    assert gptq.held_out.gptq_error == pytest.approx(float(errors[7:].mean()), rel=1e-3)
    assert 0 < gptq.fitted.gptq_error == pytest.approx(float(errors[6].mean()), rel=1e-3), "as many as kept out"


@pytest.mark.slow
def test_windows_that_are_kept_out_change_no_code_and_no_exponent(cut: Path, tmp_path: Path) -> None:
    """One checkpoint, two texts that differ in the kept-out windows alone: only the error on these is different."""
    ids = windows_of(cut, tokens=18 * 32, window=32)
    other = ids.copy()
    other[held_out(18)] = np.random.default_rng(0).integers(0, 2048, size=(1, 32))
    works = [
        passed(conversion_work(tmp_path / str(n)), planned(cut, windows)) for n, windows in enumerate((ids, other))
    ]
    assert len({work.path("codes", 1).read_bytes() for work in works}) == 1
    assert len({read_layer(work, 1).exponents for work in works}) == 1
    first, second = (decided(work, 1) for work in works)
    assert first.held_out != second.held_out
    assert replace(first, held_out=None) == replace(second, held_out=None)


def test_one_window_in_sixteen_is_kept_out() -> None:
    counts = {count: int(held_out(count).sum()) for count in (1, 2, 3, 15, 16, 17, 32, 64, 1000)}
    assert counts == {1: 0, 2: 1, 3: 1, 15: 1, 16: 1, 17: 1, 32: 2, 64: 4, 1000: 62}
    assert set(np.diff(np.flatnonzero(held_out(1000)))) == {16}


def test_a_single_window_has_no_held_out_error(cut: Path, tmp_path: Path) -> None:
    ids = windows_of(cut, tokens=64, window=64)
    gptq = decided(passed(conversion_work(tmp_path / "one"), planned(cut, ids)), 1)
    assert gptq.held_out is None
    assert gptq.fitted.gptq_error > 0


class Stop(Exception):  # noqa: N818 - the test's own
    """The layer pass was asked to stop."""


@pytest.mark.slow
def test_workers_stops_and_beginning_again_change_no_byte(cut: Path, tmp_path: Path) -> None:
    ids = windows_of(cut, tokens=512, window=64)
    whole = files_of(passed(conversion_work(tmp_path / "whole"), planned(cut, ids)))
    assert "codes-001.safetensors" in whole
    work = conversion_work(tmp_path / "three workers")
    assert files_of(passed(work, planned(cut, ids, workers=3))) == whole
    delete_quantized(work, 1)
    work.forget(0, num_layers=2)
    assert work.num_finished() == 0
    assert files_of(passed(work, planned(cut, ids))) == whole
    for call in (2, 7):
        numbers = itertools.count(1)

        def stop_at(call: int = call, numbers: Iterator[int] = numbers) -> None:
            if next(numbers) == call:
                raise Stop

        work = conversion_work(tmp_path / f"stopped {call}")
        with pytest.raises(Stop):
            passed(work, planned(cut, ids), check_stop=stop_at)
        assert work.num_finished() < 2
        assert files_of(passed(work, planned(cut, ids))) == whole


@pytest.mark.slow
def test_files_instead_of_memory_change_no_byte_and_are_gone(
    cut: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of 100 tokens of an expert, rows one by one, and everything given back after each of them."""
    ids = windows_of(cut, tokens=512, window=64)
    monkeypatch.setattr("k2convert.calibration.layer_tokens.PIECE_TOKENS", 100)
    monkeypatch.setattr("k2convert.calibration.layer_tokens._SCATTERED_ROWS", 1)
    work = passed(conversion_work(tmp_path / "files"), planned(cut, ids, workers=2))
    in_files = files_of(work)
    left = {path.suffix for path in work.folder.iterdir() if path.is_file()}
    assert left == {".safetensors", ".kept"}
    monkeypatch.setattr(Scratch, "empty", lambda _, rows, columns: torch.empty(rows, columns))
    assert files_of(passed(conversion_work(tmp_path / "memory"), planned(cut, ids, workers=2))) == in_files


@pytest.mark.slow
@pytest.mark.parametrize("case", ["few", "one token", "repeated"])
def test_few_or_equal_tokens_make_no_layer_much_worse(tiny: Path, tmp_path: Path, case: str) -> None:
    """Tokens that say little about the weights: on other tokens the layer is close to rule `mse`, or better."""
    text = windows_of(tiny, tokens=1024, window=64)
    ids = {"few": text[:1], "one token": text[:1, :1], "repeated": np.full((8, 64), text[0, 7])}[case]
    work = passed(conversion_work(tmp_path / "few"), planned(tiny, ids, num_layers=2), smoothing=False)
    with closing(WeightReader(open_checkpoint(tiny))) as reader, Calibration(work) as codes:
        hidden = DecoderLayer(reader, 0).run(embed(reader, torch.as_tensor(text[8:])))
        after, x, routing = DecoderLayer(reader, 1).attend(hidden)
        errors = [0.0, 0.0]
        for expert in range(16):
            sources = [reader.read_source(f"model.layers.1.mlp.experts.{expert}.{kind}_proj") for kind in KINDS]
            gptq = [codes.converted(f"model.layers.1.mlp.experts.{expert}.{kind}_proj") for kind in KINDS]
            mse = [quantize_mse(source, codes.global_scale) for source, codes in zip(sources, gptq, strict=True)]
            tokens, p = routing.tokens_of(expert)
            expected = Mlp(*(LinearLayer(exact_weight(source)) for source in sources))(x[tokens])
            for index, weights in enumerate((gptq, mse)):
                lost = (Mlp(*map(decoded, weights))(x[tokens]) - expected) * p[:, None]
                errors[index] += float((lost.square().sum(dim=1) / after[tokens].square().sum(dim=1)).sum())
    assert errors[0] < 1.03 * errors[1]


@pytest.mark.slow
def test_gate_and_up_dealt_out_to_two_devices_are_those_of_one(
    cut: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k2convert.calibration.gptq_layer.GROUPED_EXPERTS", 1)
    monkeypatch.setattr("k2convert.quantize.gptq.device_kernel.TritonPanels", ReferencePanels)
    used: list[str] = []
    read = MlpWeights.read

    def noted(self: MlpWeights, expert: int, projection: str, device: str) -> SourceProjection:
        used.append(f"{projection} {expert} {device}")
        return read(self, expert, projection, device)

    monkeypatch.setattr(MlpWeights, "read", noted)
    layer_pass = planned(cut, windows_of(cut, tokens=512, window=64))
    files = list[dict[str, bytes]]()
    for number, devices in enumerate((("cpu:0",), ("cpu:0", "cpu:1"))):
        files.append(files_of(passed(conversion_work(tmp_path / str(number)), on(devices, layer_pass))))
    assert files[0] == files[1]
    assert {"gate_proj 0 cpu:0", "gate_proj 1 cpu:1", "gate_proj 2 cpu:0", "up_proj 3 cpu:1"} <= set(used)


ALL_ROLES: tuple[RoleName, ...] = ("experts", "shared_experts", "dense_mlp")


@pytest.mark.slow
def test_shared_experts_and_the_dense_mlp_lose_less_than_by_mse(cut: Path, tiny_ids: Ids, tmp_path: Path) -> None:
    """On the windows that are kept out. Each layer has the codes of all its MLPs, and nothing of it is left over."""
    work = passed(conversion_work(tmp_path), planned(cut, tiny_ids), smoothing=False, roles=ALL_ROLES)
    for layer in range(2):
        errors = decided(work, layer).held_out
        assert errors is not None
        assert errors.gptq_error < errors.mse_error
        assert decided(work, layer).shared_down is not None
    assert decided(work, 0).held_out.inherited_error == 0, "nothing is converted before the dense layer"
    assert len(decided(work, 0).down_ridges) == 0
    with closing(WeightReader(open_checkpoint(cut))) as reader, Calibration(work) as codes:
        hidden = states(work.path("hidden", 1))
        embedded = embed(reader, torch.as_tensor(planned(cut, tiny_ids).ids[order(8)]))
        exact = DecoderLayer(reader, 0).run(embedded)
        torch.testing.assert_close(exact.bfloat16().float(), hidden)
        after, x, _ = DecoderLayer(reader, 0).attend(embedded)
        dense = Mlp(*(decoded(codes.converted(f"model.layers.0.mlp.{kind}_proj")) for kind in KINDS))
        lacking = exact.flatten(0, 1) - after - dense(x)
        residual = states(work.path("residual", 1)).flatten(0, 1)
        torch.testing.assert_close(lacking, residual, rtol=2.0**-8, atol=1e-5 * float(exact.abs().max()))


@pytest.mark.slow
def test_experts_are_the_same_with_and_without_another_layers_role(cut: Path, tmp_path: Path) -> None:
    """Gate and up of the experts have the damped Hessian of the same input, whatever else the recipe converts."""
    ids = windows_of(cut, tokens=512, window=64)
    weights = list[dict[str, Nvfp4Weight]]()
    for number, roles in enumerate((("experts",), ("experts", "shared_experts"))):
        work = passed(conversion_work(tmp_path / str(number)), planned(cut, ids), smoothing=False, roles=roles)
        with Calibration(work) as codes:
            names = [f"model.layers.1.mlp.experts.{expert}.gate_proj" for expert in range(4)]
            weights.append({name: codes.converted(name) for name in names})
    for name, weight in weights[0].items():
        np.testing.assert_array_equal(weight.packed, weights[1][name].packed)


def order(count: int) -> NDArray[np.int64]:
    """The order of windows in a layer pass: those that are kept out come last."""
    return np.argsort(held_out(count), kind="stable")


def test_global_scales_are_those_of_rule_mse(tiny_pass: WorkFolder, tiny: Path) -> None:
    with closing(WeightReader(open_checkpoint(tiny))) as reader, Calibration(tiny_pass) as codes:
        module = "model.layers.3.mlp.experts.5.down_proj"
        source = reader.read_source(module)
        assert codes.converted(module).global_scale == mse_global_scale(source.magnitude(name=module))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu:0", "shadow:0"])
def test_a_device_makes_nearly_the_codes_of_the_cpu(
    cut: Path, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cpu:0` takes the path of a GPU. So does `shadow:0`, which is as strict about where tensors are, and slow."""
    monkeypatch.setattr("k2convert.quantize.gptq.device_kernel.TritonPanels", ReferencePanels)
    if device != "cpu:0":
        from tests.forward import shadow_device  # noqa: F401
    layer_pass = planned(cut, np.random.default_rng(1).integers(0, 2048, size=(8, 24)), workers=2)
    works = [passed(conversion_work(tmp_path / str(n)), on((d,), layer_pass)) for n, d in enumerate(("cpu", device))]
    here, there = (decided(work, 1) for work in works)
    assert here.shrinkage is not None
    assert here.shrinkage == there.shrinkage
    assert np.isclose(here.fitted.gptq_error, there.fitted.gptq_error, rtol=0.05)
    assert here.fitted.mse_error == pytest.approx(there.fitted.mse_error, rel=0.02)
    with Calibration(works[0]) as cpu, Calibration(works[1]) as torch_codes:
        for expert in range(4):
            for kind in KINDS:
                module = f"model.layers.1.mlp.experts.{expert}.{kind}_proj"
                mine = cpu.converted(module)
                other = torch_codes.converted(module)
                assert mine.global_scale == other.global_scale
                assert (mine.packed == other.packed).mean() > 0.9


def test_a_device_that_rounds_otherwise_is_refused_before_a_weight_is_written(
    cut: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(ReferencePanels):
        def round(self, *tensors: torch.Tensor, group: int, start: int) -> None:
            super().round(*tensors, group=group, start=start)
            tensors[5][70] += 1

    monkeypatch.setattr("k2convert.quantize.gptq.device_kernel.TritonPanels", Wrong)
    check_device.cache_clear()
    layer_pass = planned(cut, windows_of(cut, tokens=512, window=64))
    work = conversion_work(tmp_path)
    with pytest.raises(PlanError, match=r"cpu:0: rule gptq rounds .* Use --device cpu"):
        passed(work, on(("cpu:0",), layer_pass))
    assert not list(work.folder.rglob("*codes*"))
