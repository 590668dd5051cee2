"""Checkpoints every test may read, and the command as users run it.

The checkpoints are shared by the whole session: read them, never write into them. A test that needs a damaged one
copies first.
"""

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

# With this variable, every process of a test would compile all modules that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

import pytest  # noqa: E402
from command import ROOT, RunCli, run_here  # noqa: E402
from fake_system import make_system  # noqa: E402
from made_once import made_once  # noqa: E402

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


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
    """Leave all modules and tests out of every collection of garbage: a layer pass collects it after each layer."""
    gc.freeze()


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
    """The folder in which this session's checkpoints are made, by one of its processes for all of them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "checkpoints"
    folder.mkdir(exist_ok=True)
    return folder


def made_by(make: Callable[[Path], Path]) -> Any:
    """A fixture: the checkpoint that `make` writes, once per session, into a folder of the fixture's name."""

    @pytest.fixture(scope="session")
    def checkpoint(request: pytest.FixtureRequest, checkpoints: Path) -> Path:
        return made_once(checkpoints / str(request.fixturename).replace("_", "-"), make)

    return checkpoint


tiny = made_by(fixtures.make_tiny)
"""The tiny checkpoint with every field of the published configs: 3 MoE layers, 144 INT4 projections.

K2's rope_scaling is one of them. `trained` is the same model without it, as it was trained.
"""
k25 = made_by(fixtures.make_k25)
"""The tiny checkpoint in K2.5's layout."""
split = made_by(fixtures.make_split)
"""The tiny checkpoint with partners in different shards."""
reap = made_by(fixtures.make_reap)
"""The tiny checkpoint pruned to 10 of 16 experts."""
cut = made_by(fixtures.make_cut)
"""One dense and one MoE layer of four experts of the tiny checkpoint, with partners in different shards."""
short = made_by(fixtures.make_short)
"""The dense layer and two MoE layers of four experts of the tiny checkpoint, each in a shard of its own."""
i64 = made_by(fixtures.make_i64)
"""The tiny checkpoint with weight_shape as I64."""
minus8 = made_by(fixtures.make_minus8)
"""The tiny checkpoint with codes of -8 planted."""
zeros = made_by(fixtures.make_zeros)
"""The tiny checkpoint with zero blocks, groups and tensors planted."""
subnormal = made_by(fixtures.make_subnormal)
"""The tiny checkpoint with subnormal scales planted."""
wide = made_by(fixtures.make_wide)
"""The tiny checkpoint with widely spread scales planted."""
k2_shaped = made_by(partial(fixtures.make_k2_shaped, shape=fixtures.SMALL_SHAPE))
"""A K2-shaped checkpoint, much reduced: one dense and one MoE layer, two experts of 256 x 512."""
k2_headers = made_by(fixtures.make_k2_thinking_headers)
"""The whole of Kimi-K2-Thinking as sparse files: 594 GB apparent, 47 MB on disk, made in 4 seconds."""
k25_headers = made_by(fixtures.make_k25_headers)
"""The whole of Kimi-K2.5 in the same form."""
SHAPE_OF_NUMBERS = fixtures.K2Shape(hidden=4 * 7168, moe_intermediate=4 * 2048, experts=24)
k2_numbers = made_by(partial(fixtures.make_k2_thinking_headers, shape=SHAPE_OF_NUMBERS))
"""As many layers and expert weights as K2 in a sixteenth of its experts, for numbers as long as K2's."""
k3_tiny = made_by(fixtures.make_k3_tiny)
"""A small Kimi-K3: three MoE layers of four experts, 36 MXFP4 projections."""


def _lively(folder: Path, **sizes: int) -> Path:
    from kimi_k3_network import make_lively_k3

    return make_lively_k3(folder, **sizes)


k3_lively = made_by(_lively)
"""A small Kimi-K3 of five layers in blocks of two, whose parts all matter to the output."""
k3_cut = made_by(partial(_lively, layers=2, block=1))
"""A dense KDA layer and an MLA layer with experts of it, each of which begins a block."""
k3_edges = made_by(fixtures.make_k3_edges)
"""The small Kimi-K3 with edges planted: wide spreads, empty groups, split partners, F8_E8M0."""
k3_headers = made_by(fixtures.make_k3_headers)
"""The whole of Kimi-K3 as sparse files: 1.56 TB apparent."""


@pytest.fixture(scope="session")
def trained() -> Path:
    """The tiny checkpoint as it was trained, in place: for what depends on its numbers."""
    return fixtures.TINY


@pytest.fixture(scope="session")
def local_result(tiny: Path, checkpoints: Path) -> Path:
    """The tiny checkpoint converted from folder to folder."""
    return made_once(checkpoints / "local-result", lambda folder: run_here("run", tiny, folder, code=0))


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
    monkeypatch.setattr("k2convert.report.render.draw_charts", lambda _report: [])
    monkeypatch.setattr("k2convert.report.render.render_picture", lambda _report, _charts: b"\x89PNG")


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
