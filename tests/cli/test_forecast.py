"""What a calibration will need: said before it starts, and refused when it is not there."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from command import peak_of, run_cli, run_here

from k2convert.cli.console import format_span
from scripts.fixture_maker import K2Shape, make_k2_shaped

SHAPE = K2Shape(
    hidden=1536, moe_intermediate=256, dense_intermediate=4096, experts=8, moe_layers=1, dense_layers=1,
    vocabulary=1024, heads=16, q_lora_rank=256, kv_lora_rank=128,
)  # fmt: skip


@pytest.mark.parametrize(
    ("least", "most", "said"),
    [
        (1, 59, "less than a minute"),
        (50, 100, "about 1 to 2 minutes"),
        (600, 1200, "about 10 to 20 minutes"),
        (1330, 1290 * 2, "about 20 to 45 minutes"),
        (3000, 7000, "about 50 minutes to 2 hours"),
        (20 * 3600, 40 * 3600, "about 20 to 40 hours"),
        (40 * 3600, 50 * 3600, "about 40 hours to 2 days"),
        (3.1 * 86400, 5.2 * 86400, "about 3 to 5 days"),
        (3 * 86400, 3.2 * 86400, "about 3 days"),
        (123 * 86400, 1234 * 86400, "about 100 to 1,000 days"),
    ],
)
def test_a_duration_is_said_as_a_range_of_round_numbers(least: float, most: float, said: str) -> None:
    assert format_span(least, most) == said


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_k2_shaped(tmp_path_factory.mktemp("shaped") / "k2", shape=SHAPE)


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ids") / "ids.npy"
    np.save(path, np.random.RandomState(0).randint(0, 1000, 1024))
    return path


def text_words(verb: str, file: Path, *, tokens: int, window: int) -> tuple[object, ...]:
    """The options that calibrate on a file, as each verb has them."""
    if verb == "run":
        return ("--calibrate", file, "--set", f"calibration={{tokens: {tokens}, window: {window}}}")
    return ("--text", file, "--tokens", tokens, "--window", window)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "kind"),
    [("run", "cut"), ("calibrate", "shaped"), ("run", "tiny"), ("calibrate", "tiny"), ("run", "shaped")],
)
def test_a_dry_run_says_the_memory_that_the_run_takes(
    ids: Path, tmp_path: Path, verb: str, kind: str, request: pytest.FixtureRequest
) -> None:
    source: Path = request.getfixturevalue(kind)
    window = 512 if kind == "shaped" else 128
    words = [verb, source, tmp_path / "out", *text_words(verb, ids, tokens=1024, window=window), "--device", "cpu"]
    dry = run_cli(*words, "--dry-run", "--json")  # in processes of their own, which have their own peaks
    assert dry.returncode == 0, dry.stderr
    document = json.loads(dry.stdout)
    said = document["memory_bytes"] if verb == "calibrate" else document["estimate"]["memory_bytes"]
    peak = peak_of(*words, "--quiet")
    assert said == pytest.approx(peak, rel=0.25), (said / 1e9, peak / 1e9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cut", "shaped"])
def test_a_dry_run_says_the_memory_and_the_disk_of_the_evaluation_at_the_end(
    ids: Path, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    source: Path = request.getfixturevalue(kind)
    words = ["run", source, tmp_path / "out", "--evaluate", ids, "--device", "cpu"]
    alone = json.loads(run_cli(*words[:3], "--dry-run", "--json").stdout)
    dry = json.loads(run_cli(*words, "--dry-run", "--json").stdout)
    shown = run_cli(*words, "--dry-run").stdout
    assert "evaluation at the end, on 1,024 tokens of ids.npy" in shown
    assert shown.count("memory: needs about") == 2  # of the job, and of its evaluation
    said = dry["estimate"]["memory_bytes"]
    assert said == max(dry["evaluation"]["memory_bytes"], said) > alone["estimate"]["memory_bytes"]
    assert dry["disk_needed"] > alone["disk_needed"]
    peak = peak_of(*words, "--quiet")
    assert said == pytest.approx(peak, rel=0.25), (said / 1e9, peak / 1e9)


@pytest.mark.parametrize("verb", ["calibrate", "run"])
def test_what_needs_more_memory_than_there_is_is_refused(
    tiny: Path, ids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr("k2convert.cli.forecast.available_memory", lambda: 100 << 20)
    words = (verb, tiny, tmp_path / "out", *text_words(verb, ids, tokens=1024, window=128), "--quiet")
    for more in ((), ("--dry-run",)):
        done = run_here(*words, "--device", "cpu", *more)
        error = done.stderr
        assert (done.returncode, error.count("\n")) == (1, 1)
        assert error.startswith(f"error: {tiny}: needs about ")
        assert "B is available. Use fewer tokens, a shorter window, or a machine with more memory." in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["h200", "64-cores", "gpu", "cuda:0", ""])
def test_a_device_that_is_not_here_is_refused_in_one_line(tiny: Path, ids: Path, tmp_path: Path, name: str) -> None:
    words = ("--device", name, "--dry-run")
    for verb, *more in (
        ("calibrate", tiny, tmp_path / "out", "--text", ids),
        ("run", tiny, tmp_path / "out", "--calibrate", ids),
        ("run", tiny, tmp_path / "out"),
        ("evaluate", tiny, tiny, "--text", ids, "--out", tmp_path / "out.json"),
    ):
        done = run_here(verb, *more, *words, code=2)
        error = done.stderr.splitlines()[-1]
        assert f"'--device': '{name}' is not auto, cpu or cuda." in error
        assert error.endswith("see `k2convert guide calibrate`.")
    assert not list(tmp_path.iterdir())


@pytest.mark.quick(1)
@pytest.mark.parametrize("verb", ["calibrate", "run", "evaluate"])
def test_a_long_computation_needs_long_and_the_next_command_has_it(
    cut: Path, ids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr("k2convert.cli.forecast.MAX_HOURS", 0)
    if verb == "evaluate":
        run_here("run", cut, tmp_path / "out", "--quiet", code=0)
    words = (verb, cut, tmp_path / "out", *text_words(verb, ids, tokens=128, window=64))
    for more in ((), ("--dry-run",)):
        refused = run_here(*words, "--device", "cpu", *more, code=1)
        assert "fewer tokens, or repeat the command with --long." in refused.stderr.splitlines()[-1]
        assert "next: " not in refused.stderr
    shown = run_here(*words, "--device", "cpu", "--dry-run", "--long", code=0)
    [following] = [line for line in shown.stderr.splitlines() if line.startswith("next: ")]
    run_here(*shlex.split(following.removeprefix("next: k2convert ")), "--quiet", code=0)


@pytest.mark.parametrize("verb", ["calibrate", "evaluate"])
def test_yes_is_for_publishing_alone(tiny: Path, ids: Path, tmp_path: Path, verb: str) -> None:
    done = run_here(verb, tiny, tmp_path / "out", "--text", ids, "--yes", code=2)
    assert "--yes" in done.stderr
