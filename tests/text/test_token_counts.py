"""How many tokens a calibration uses without being told, and what is said when experts got few."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command import run_here
from hypothesis import given, settings
from hypothesis import strategies as st

from k2convert.checkpoint.index import Checkpoint, open_checkpoint
from k2convert.cli.needs import fewest_tokens
from k2convert.text.windows import default_tokens, experts_per_token, fitted_tokens, tokens_to_fit

CONFIG = Path(__file__).resolve().parents[1] / "data" / "published-configs" / "nvidia--Kimi-K2.6-NVFP4_config.json"


def with_counts(source: Path, **counts: int) -> Checkpoint:
    checkpoint = open_checkpoint(source)
    return replace(checkpoint, config_text=json.dumps(checkpoint.parse_config() | counts))


def test_the_default_fits_an_expert_to_twice_its_inputs_and_fills_windows(tiny: Path) -> None:
    published = json.loads(CONFIG.read_text())["text_config"]
    counts = {key: published[key] for key in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")}
    assert list(counts.values()) == [384, 8, 2048]
    assert default_tokens(with_counts(tiny, **counts), window=2048) == 208_896
    assert fitted_tokens(208_896, window=2048) == 2 * 2048 * 384 // 8, "6 of 102 windows are held out"
    assert fitted_tokens(default_tokens(with_counts(tiny, **counts), window=1000), window=1000) == 197_000
    more = with_counts(tiny, **counts | {"n_routed_experts": 385})
    assert fitted_tokens(default_tokens(more, window=1), window=1) == 2 * 2048 * 385 // 8
    assert fitted_tokens(default_tokens(open_checkpoint(tiny), window=2048), window=2048) == 131_072, "never less"
    absurd = with_counts(tiny, n_routed_experts=10_000, moe_intermediate_size=1_000_000)
    assert fitted_tokens(default_tokens(absurd, window=2048), window=2048) == 1 << 20, "no config makes a pass endless"


@settings(deadline=None, derandomize=True)
@given(fitted=st.integers(0, 1 << 21), window=st.integers(1, 5000))
def test_tokens_to_fit_are_the_least_that_leave_so_many_after_the_held_out_ones(fitted: int, window: int) -> None:
    tokens = tokens_to_fit(fitted, window=window)
    assert tokens % window == 0
    assert fitted_tokens(tokens, window=window) >= fitted
    assert tokens == window or fitted_tokens(tokens - window, window=window) < fitted


@pytest.mark.parametrize(("config", "chosen"), [(CONFIG, 8), (CONFIG.with_name("moonshotai--Kimi-K3_config.json"), 16)])
def test_the_experts_of_a_token_are_read_under_each_name(config: Path, chosen: int, tiny: Path) -> None:
    assert experts_per_token(replace(open_checkpoint(tiny), config_text=config.read_text())) == chosen


def test_the_layer_with_the_least_median_is_the_one_that_is_named() -> None:
    assert fewest_tokens({1: (9, 9, 0), 2: (8, 7, 100), 3: (50, 8, 8, 90)}) == (2, 8)


@pytest.mark.slow
def test_the_default_is_said_before_the_start_and_a_short_text_is_no_error(
    cut: Path, text: Path, tmp_path: Path
) -> None:
    words = ("run", cut, tmp_path / "out", "--calibrate", text, "--device", "cpu")
    dry = run_here(*words, "--dry-run", code=0)
    inputs = open_checkpoint(cut).config["moe_intermediate_size"]
    needs = f"an expert needs {2 * inputs} (2 per input)"
    reason = f"default: 139,264 tokens, or 131,072 per expert if spread evenly; {needs}"
    assert f"{reason}\n" in dry.stdout
    assert "; 139,264 are wanted" in dry.stderr
    calibration = json.loads(run_here(*words, "--dry-run", "--json").stdout)["calibration"]
    assert calibration["tokens"] < calibration["tokens_asked"] == 139_264
    assert calibration["tokens_reason"].startswith(reason)
    words = (*words, "--set", "calibration={tokens: 128, window: 64}")
    explicit = run_here(*words, "--dry-run")
    assert "default: " not in explicit.stdout
    done = run_here(*words, code=0)
    fitted = 64  # one of two windows is kept out
    line = f"the median expert of layer 1 saw {fitted} tokens, the fewest of all layers"
    enough = tokens_to_fit(2 * inputs, window=64)
    assert f"{line}. It needs {2 * inputs}: use --set calibration.tokens={enough}\n" in done.stdout
