"""Results of `run --calibrate` with smoothing: exact powers of two hold, and one changed exponent is found."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conversions
import pytest
import torch
from converted import seal

from k2convert.check.results import LayersRequest, ValidationReport, Verdict
from k2convert.check.validate import validate_checkpoint
from k2convert.checkpoint.index import open_checkpoint
from k2convert.hub.source_card import SourceCard
from k2convert.report import card_files
from scripts.fixture_maker import make_k25
from scripts.fixture_maker.damage import edit_json, edit_tensor
from scripts.fixture_maker.folder import read_small, write_small

LAYER = "model.layers.1"
NORM = f"{LAYER}.post_attention_layernorm.weight"
ROUTER = f"{LAYER}.mlp.gate.weight"
SHARED_GATE, SHARED_UP = (f"{LAYER}.mlp.shared_experts.{kind}_proj.weight" for kind in ("gate", "up"))
CHANNEL = 37

Convert = Callable[..., Path]


@pytest.fixture(scope="module")
def convert(cut: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """Convert the small checkpoint by rule gptq, once for each set of options. Read it only."""
    folders: dict[str, Path] = {}

    def run(**options: Any) -> Path:
        key = repr(sorted(options.items()))
        if key not in folders:
            folder = tmp_path_factory.mktemp("smoothed") / "out"
            folders[key] = conversions.convert(cut, folder, text=conversions.text_of(cut, [text]), **options)
        return folders[key]

    return run


@pytest.fixture
def damaged(convert: Convert, tmp_path: Path) -> Path:
    """A copy of a W4A4 result, to be changed."""
    return Path(shutil.copytree(convert(), tmp_path / "damaged"))


def validate(folder: Path, source: Path, **options: Any) -> ValidationReport:
    return validate_checkpoint(folder=folder, source=open_checkpoint(source), **options)


def card_of(folder: Path, validation: ValidationReport) -> str:
    """The card that the Hub would get."""
    tensors = open_checkpoint(folder).tensors.values()
    files = card_files(
        folder, repo="me/out", base_model=None, source=SourceCard(), validation=validation, tensors=tensors
    )
    return files["README.md"].decode()


def offenders(report: ValidationReport) -> dict[int, dict[str, str]]:
    """What each rule that failed says, by name."""
    failed = (rule for rule in report.contract.rules if rule.verdict is Verdict.FAIL)
    return {rule.number: {o.name: o.problem for o in rule.offenders} for rule in failed}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("recipe", "tensors"),
    [
        ({"roles": ("experts", "shared_experts", "dense_mlp")}, 18),
        ({"layout": "modelopt", "activations": "w4a4"}, 12),
        ({"layout": "compressed-tensors", "activations": "w4a4"}, 12),
        ({"layout": "modelopt", "activations": "w4a16"}, 12),
    ],
)
def test_a_smoothed_result_keeps_all_rules(recipe: dict[str, Any], tensors: int, cut: Path, convert: Convert) -> None:
    report = validate(convert(**recipe), cut)
    assert report.passed, offenders(report)
    assert [rule.number for rule in report.contract.rules if rule.verdict is Verdict.SKIPPED] == []
    title = report.contract.rules[6].title
    note = report.contract.rules[6].note
    if recipe.get("activations") == "w4a16":
        assert title.endswith("byte-identical to the source")
    else:
        assert "scaled exactly by the norm's powers of two" in title
        assert note.endswith("2 of them scaled" if tensors == 18 else "4 of them scaled")
    assert report.weights is not None
    assert len(report.weights.errors) == tensors
    card = card_of(convert(**recipe), report)
    assert ("the norm before the experts" in card) == (recipe.get("activations") != "w4a16")
    assert ("gate and up of the shared experts" in card) == (recipe.get("activations") == "w4a4"), "if these are copied"


@pytest.mark.slow
def test_k25_with_an_fp32_router_keeps_all_rules(cut: Path, text: Path, tmp_path: Path) -> None:
    small = read_small(cut)
    small.replace(ROUTER, small.tensors()[ROUTER].float())
    source = make_k25(tmp_path / "k25", write_small(small, tmp_path / "fp32"))
    conversions.convert(source, tmp_path / "out", text=conversions.text_of(cut, [text]))
    assert validate(tmp_path / "out", source).passed
    edit_tensor(tmp_path / "out", f"language_model.{ROUTER}", times(2.0))
    assert list(offenders(validate(tmp_path / "out", source))[7]) == [f"language_model.{ROUTER}"]


def test_layers_get_the_scaled_input(cut: Path, convert: Convert) -> None:
    """The shared experts are BF16: scaled columns and a scaled input give their output without any error."""
    request = LayersRequest((1,), None, tokens=32)
    report = validate(convert(), cut, layers=request).layers
    assert report is not None
    (layer,) = report.layers
    assert next(e for e in layer.errors if e.variant == "converted").shared_experts_sqnr_db == float("inf")


def times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Multiply one channel of a tensor."""

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        tensor[..., CHANNEL] *= factor
        return tensor

    return apply


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "factor", "words"),
    [
        (NORM, 2.0, "but the ledger states"),
        (NORM, 2.0**9, "smoothing uses 2^-4 to 2^4"),
        (NORM, 1.5, "not a power of two times it"),
        (ROUTER, 0.5, f"first in column {CHANNEL}"),
        (SHARED_GATE, 2.0, f"first in column {CHANNEL}"),
        (SHARED_UP, 0.5, f"first in column {CHANNEL}"),
    ],
)
def test_one_changed_exponent_is_found_by_name(name: str, factor: float, words: str, cut: Path, damaged: Path) -> None:
    edit_tensor(damaged, name, times(factor))
    seal(damaged)
    report = validate(damaged, cut)
    assert not report.passed
    assert words in offenders(report)[7][name]


def test_a_changed_digest_of_the_exponents_is_found(cut: Path, damaged: Path) -> None:
    edit_json(damaged / "k2convert.json", lambda d: d["calibration"].update(exponents_digest="0" * 64))
    assert list(offenders(validate(damaged, cut))[7]) == ["k2convert.json: calibration.exponents_digest"]


def test_a_ledger_without_smoothing_allows_no_change(cut: Path, damaged: Path) -> None:
    changes: tuple[Callable[[dict[str, Any]], object], ...] = (
        lambda d: d["calibration"].update(smoothing=False, exponents_digest=None),
        lambda d: d.pop("calibration"),
    )
    for change in changes:
        edit_json(damaged / "k2convert.json", change)
        assert set(offenders(validate(damaged, cut))[7]) == {NORM, ROUTER, SHARED_GATE, SHARED_UP}
