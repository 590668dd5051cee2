"""Checkpoints every test may read, and the command as users run it.

The checkpoints are shared by the whole session: read them, never write into them. A test that needs a damaged one
copies first.
"""

import gc
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

# With this variable, every process of a test would compile all modules that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

import pytest  # noqa: E402
from command import RunCli, run_here  # noqa: E402
from fake_system import make_system  # noqa: E402
from markupsafe import Markup  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from statistics_makers import random_statistics  # noqa: E402

from k2convert.job import estimate  # noqa: E402  (after the path is set)
from scripts import fixture_maker as fixtures  # noqa: E402


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases as slow beyond the first N of a test that is marked `quick(N)`; it has no slow ones of its own."""
    cases: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("quick")
        if mark is not None:
            if item.get_closest_marker("slow") is not None:
                raise pytest.UsageError(
                    f"{item.nodeid}: is marked as slow, so it is not one of {mark.args[0]} quick cases"
                )
            name = item.nodeid.partition("[")[0]
            cases[name] += 1
            if cases[name] > mark.args[0]:
                item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Leave all modules and tests out of every collection of garbage: a walk collects it after each layer."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _quick_dry_runs() -> Iterator[None]:
    """A dry run measures disk and kernels for a moment only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "MEASURE_SECONDS", 0.01)
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors are slower on several threads, above all when other tests run at the same time."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which this session's checkpoints are made."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def tiny(checkpoints: Path) -> Path:
    """The tiny checkpoint with every field of the published configs: 3 MoE layers, 144 INT4 projections.

    K2's rope_scaling is one of them. `trained` is the same model without it, as it was trained.
    """
    return fixtures.make_tiny(checkpoints / "tiny")


@pytest.fixture(scope="session")
def trained() -> Path:
    """The tiny checkpoint as it was trained, in place: for what depends on its numbers."""
    return fixtures.TINY


@pytest.fixture(scope="session")
def k25(checkpoints: Path) -> Path:
    """The tiny checkpoint in K2.5's layout."""
    return fixtures.make_k25(checkpoints / "k25")


@pytest.fixture(scope="session")
def split(checkpoints: Path) -> Path:
    """The tiny checkpoint with partners in different shards."""
    return fixtures.make_split(checkpoints / "split")


@pytest.fixture(scope="session")
def reap(checkpoints: Path) -> Path:
    """The tiny checkpoint pruned to 10 of 16 experts."""
    return fixtures.make_reap(checkpoints / "reap")


@pytest.fixture(scope="session")
def cut(checkpoints: Path) -> Path:
    """One dense and one MoE layer of four experts of the tiny checkpoint, with partners in different shards."""
    return fixtures.make_cut(checkpoints / "cut")


@pytest.fixture(scope="session")
def short(checkpoints: Path) -> Path:
    """The dense layer and two MoE layers of four experts of the tiny checkpoint, each in a shard of its own."""
    return fixtures.make_short(checkpoints / "short")


@pytest.fixture(scope="session")
def i64(checkpoints: Path) -> Path:
    """The tiny checkpoint with weight_shape as I64."""
    return fixtures.make_i64(checkpoints / "i64")


@pytest.fixture(scope="session")
def minus8(checkpoints: Path) -> Path:
    """The tiny checkpoint with codes of -8 planted."""
    return fixtures.make_minus8(checkpoints / "minus8")


@pytest.fixture(scope="session")
def zeros(checkpoints: Path) -> Path:
    """The tiny checkpoint with zero blocks, groups and tensors planted."""
    return fixtures.make_zeros(checkpoints / "zeros")


@pytest.fixture(scope="session")
def subnormal(checkpoints: Path) -> Path:
    """The tiny checkpoint with subnormal scales planted."""
    return fixtures.make_subnormal(checkpoints / "subnormal")


@pytest.fixture(scope="session")
def wide(checkpoints: Path) -> Path:
    """The tiny checkpoint with widely spread scales planted."""
    return fixtures.make_wide(checkpoints / "wide")


@pytest.fixture(scope="session")
def k2_shaped(checkpoints: Path) -> Path:
    """A K2-shaped checkpoint, much reduced: one dense and one MoE layer, two experts of 256 x 512."""
    return fixtures.make_k2_shaped(checkpoints / "k2-shaped", shape=fixtures.SMALL_SHAPE)


@pytest.fixture(scope="session")
def k2_headers(checkpoints: Path) -> Path:
    """The whole of Kimi-K2-Thinking as sparse files: 594 GB apparent, 47 MB on disk, made in 4 seconds."""
    return fixtures.make_k2_thinking_headers(checkpoints / "k2-headers")


@pytest.fixture(scope="session")
def k2_numbers(checkpoints: Path) -> Path:
    """As many layers and expert weights as K2 in a sixteenth of its experts, for numbers as long as K2's."""
    shape = fixtures.K2Shape(hidden=4 * 7168, moe_intermediate=4 * 2048, experts=24)
    return fixtures.make_k2_thinking_headers(checkpoints / "k2-numbers", shape=shape)


@pytest.fixture(scope="session")
def k3_tiny(checkpoints: Path) -> Path:
    """A small Kimi-K3: three MoE layers of four experts, 36 MXFP4 projections."""
    return fixtures.make_k3_tiny(checkpoints / "k3-tiny")


@pytest.fixture(scope="session")
def k3_edges(checkpoints: Path) -> Path:
    """The small Kimi-K3 with edges planted: wide spreads, empty groups, split partners, F8_E8M0."""
    return fixtures.make_k3_edges(checkpoints / "k3-edges")


@pytest.fixture(scope="session")
def k3_headers(checkpoints: Path) -> Path:
    """The whole of Kimi-K3 as sparse files: 1.56 TB apparent."""
    return fixtures.make_k3_headers(checkpoints / "k3-headers")


@pytest.fixture(scope="session")
def local_result(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint converted from folder to folder."""
    folder = tmp_path_factory.mktemp("local") / "out"
    run_here("run", tiny, folder, code=0)
    return folder


@pytest.fixture(scope="session")
def statistics(cut: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random statistics of `cut`."""
    return random_statistics(tmp_path_factory.mktemp("statistics") / "cut.stats", cut)


@pytest.fixture(scope="session")
def text(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 kB of the checkpoint's calibration text."""
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text((tiny / "calibration.txt").read_text()[:6000])
    return path


@pytest.fixture(scope="session", name="run_cli")
def _run_cli() -> RunCli:
    """Run the real `k2convert` command, in this process."""
    return run_here


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root folder of a machine that does not exist."""
    make_system(tmp_path / "system", monkeypatch)
    return tmp_path / "system"


@pytest.fixture
def quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without charts, whose drawing is half of a job's time here."""
    monkeypatch.setattr("k2convert.report.page._charts", lambda _report: defaultdict(Markup))
    monkeypatch.setattr("k2convert.report.page.render_picture", lambda _report: b"\x89PNG")


@pytest.fixture(params=["vectors", "portable"])
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test twice: with the kernels for AVX2 or NEON, where the CPU has one, and with the portable ones."""
    from k2convert.quantize.kernels import _cpu

    before = _cpu.instructions()
    if before == "portable" and request.param != before:
        pytest.skip("this CPU has neither AVX2 nor NEON")
    _cpu.use_instructions(before if request.param == "vectors" else "portable")
    yield
    _cpu.use_instructions(before)
