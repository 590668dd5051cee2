"""Rates over the last seconds, and an ETA only when there is one."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k2convert.cli.progress import Display
from k2convert.records.events import Extent


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def every(self, seconds: float, call: Callable[[], object], *, times: int) -> None:
        for _ in range(times):
            self.now += seconds
            call()


def begun(clock: Clock, extent: Extent) -> Display:
    counts = Display(extent, clock=clock)
    counts.begun(extent)
    return counts


def converting(clock: Clock, total: int) -> Display:
    return begun(clock, Extent({"convert": (total, 0)}))


def test_the_rate_is_that_of_the_last_minutes_and_the_eta_that_of_all_work() -> None:
    clock = Clock()
    counts = converting(clock, 1_000_000)
    meter = counts.meters["convert"]
    clock.every(1, lambda: counts.progress(bytes_in=10), times=600)
    assert meter.rate == 10
    clock.every(1, lambda: counts.progress(bytes_in=1000), times=180)
    assert meter.rate == 1000, "the first ten minutes were slow, the last three are not"
    assert meter.seconds_left == pytest.approx((1_000_000 - 186_000) * 780 / 186_000)


def test_there_is_neither_rate_nor_eta_without_data_and_for_a_line_that_stands_still() -> None:
    clock = Clock()
    counts = converting(clock, 1000)
    meter = counts.meters["convert"]
    assert (meter.rate, meter.seconds_left) == (None, None)
    clock.now += 0.1
    counts.progress(bytes_in=10)
    assert (meter.rate, meter.seconds_left) == (None, None), "a tenth of a second says nothing"
    clock.every(1, lambda: counts.progress(bytes_in=10), times=10)
    assert meter.seconds_left is not None
    clock.now += 120
    assert (meter.rate, meter.seconds_left) == (None, None)


def test_a_phase_that_waits_says_for_what_until_it_goes_on() -> None:
    clock = Clock()
    counts = begun(clock, Extent({"download": (1000, 0), "convert": (1000, 0)}, shards=2))
    clock.every(1, lambda: counts.transferred(downloaded=50), times=10)
    counts.waits("download", "waits for room")
    counts.waits("convert", "validates model-00001")
    counts.waits("upload", "waits for a shard")
    assert counts.line() == (
        "download: 50 % (500 B of 1.00 kB) waits for room, convert: 0 % (0 B of 1.00 kB) validates model-00001, "
        "0 of 2 shards"
    )
    counts.transferred(downloaded=50)
    counts.waits("convert", "")
    assert "waits" not in counts.line()
    assert "validates" not in counts.line()


def test_whole_shards_that_arrive_rarely_still_have_a_rate_between_them() -> None:
    clock = Clock()
    counts = converting(clock, 62 * 9_600)
    clock.every(80, lambda: counts.progress(bytes_in=9_600), times=4)
    clock.now += 40
    assert counts.meters["convert"].rate == 120


def test_what_an_earlier_run_did_counts_as_done_but_not_as_fast() -> None:
    clock = Clock()
    counts = begun(clock, Extent({"upload": (1000, 0)}))
    meter = counts.meters["upload"]
    clock.every(1, lambda: counts.transferred(uploaded=10), times=5)
    for amount, done in ((500, 550), (-500, 50)):
        counts.transferred(uploaded=amount, is_new=False)
        assert (meter.done, meter.rate) == (done, 10)


def test_the_eta_of_a_job_is_that_of_its_slowest_phase_and_of_a_validation_the_sum() -> None:
    clock = Clock()
    job = begun(clock, Extent({"download": (1000, 0), "convert": (1000, 0)}))
    for _ in range(5):
        clock.now += 1
        job.transferred(downloaded=100)
        assert job.seconds_left is None, "nothing was converted yet"
    clock.every(1, lambda: job.progress(bytes_in=50), times=6)
    assert job.seconds_left == (1000 - 300) / 50

    check = begun(clock, Extent({"check": (1000, 0)}, num_experts=100))
    clock.every(1, lambda: check.progress(bytes_in=100), times=10)
    assert check.seconds_left is None, "no layer was computed yet"
    assert [meter.share for meter in check.meters.values()] == [1.0, 0.0], "layers are still to come"
    for done in range(1, 9):
        clock.now += 1
        check.experts_computed(1, done, 100)
    assert check.seconds_left is not None
    assert 80 < check.seconds_left < 120


@pytest.mark.parametrize(
    ("done", "waiting", "faster_from", "outage", "first"),
    [
        (0, 0, 99, 99, 3),
        (30, 0, 99, 99, 3),
        (30, 2, 99, 99, 6),
        (0, 0, 20, 99, 25),
        (0, 0, 99, 10, 3),
        (50, 0, 99, 58, 3),
    ],
    ids=["new", "resumed", "resumed with shards to send", "twice as fast", "an outage", "an outage of few shards"],
)
def test_from_the_third_shard_on_the_eta_of_a_job_with_the_hub_is_right_within_a_fifth(
    done: int, waiting: int, faster_from: int, outage: int, first: int
) -> None:
    """As K2's went: 62 shards of 68 s. Each is fetched, converted in 35 s, then sent in 35 s.

    An earlier run has converted `done` shards, and not sent `waiting` of them. From the `first` one that is sent. An
    `outage` of three minutes begins as this shard is fetched.
    """
    num_shards, size = 62, 1000
    clock = Clock()
    phases = dict.fromkeys(("download", "convert", "upload"), (num_shards * size, done * size))
    phases["upload"] = (num_shards * size, (done - waiting) * size)
    counts = begun(clock, Extent(phases, num_shards, done))
    steps = [(5.0 + n, "upload") for n in range(10 * waiting)]
    begin = 0.0
    for number in range(done, num_shards):
        pace = 0.5 if number >= faster_from else 1.0
        steps += [(begin + pace * 6 * i, "download") for i in range(1, 11)]
        steps += [(begin + pace * (78 + 3.5 * i), "convert") for i in range(1, 11)]
        steps += [(begin + pace * (166 + 3.5 * i), "upload") for i in range(1, 11)]
        begin += 68 * pace
    away = 68.0 * (outage - done) + 20
    steps = [(at + 180 * (at > away), phase) for at, phase in steps]
    start = clock.now
    end = max(steps)[0]
    sent = 0.0
    for at, phase in sorted(steps):
        clock.now = start + at
        if phase == "convert":
            counts.progress(bytes_in=size // 10)
        elif phase == "download":
            counts.transferred(downloaded=size // 10)
        else:
            sent += 0.1
            counts.transferred(uploaded=size // 10)
        if sent == 0:
            assert counts.seconds_left is None
        elif first <= sent < num_shards - done + waiting - 1:
            truth = end - at - 180 * (at <= away < end)
            assert counts.seconds_left == pytest.approx(truth, rel=0.2), (sent, phase)


@given(st.lists(st.tuples(st.sampled_from((0.0, 0.5, 40.0)), st.integers(-250, 250)), max_size=60))
def test_uploads_that_fail_and_are_sent_again_leave_an_eta(steps: list[tuple[float, int]]) -> None:
    """Their bytes are taken back, a whole shard or a part of it."""
    clock = Clock()
    counts = begun(clock, Extent({"upload": (2000, 0)}, 20))
    meter = counts.meters["upload"]
    for seconds, amount in steps:
        clock.now += seconds
        counts.transferred(uploaded=max(amount, -meter.done))
        left = counts.seconds_left
        assert left is None or left >= 0
        json.dumps(counts.summary(), allow_nan=False)
    if meter.done > 2000:
        return
    done = meter.done
    for _ in range(4):  # work that is steady again
        clock.now += 10
        counts.transferred(uploaded=100)
    if done + 400 < 2000:
        assert counts.seconds_left == pytest.approx((2000 - done - 400) / 10, rel=0.2)


def test_the_summary_for_status_has_the_unit_of_layers() -> None:
    summaries: list[str] = []
    extent = Extent({"convert": (1000, 0), "calibrate": (400, 0)}, 5, 2, layer_tokens=100)
    counts = Display(extent)
    counts.begun(extent, keep=summaries.append)
    summary = json.loads(summaries[-1])
    assert summary == counts.summary()
    assert summary["phases"]["calibrate"] == {"done": 0, "total": 400, "rate": None, "unit": 100}


def test_work_that_waits_for_a_calibration_has_no_say_in_its_eta() -> None:
    clock = Clock()
    counts = begun(clock, Extent({"calibrate": (500, 100), "convert": (1000, 500)}, layer_tokens=100))
    clock.every(10, lambda: counts.tokens_computed(10), times=20)
    counts.progress(bytes_in=100)
    clock.now += 5
    counts.progress(bytes_in=100)
    clock.every(10, lambda: counts.tokens_computed(10), times=6)
    assert counts.meters["convert"].rate is None, "it waits for the next layer"
    assert counts.meters["calibrate"].rate == 36, "a layer took 100 s"
    assert counts.seconds_left == 135, "what is left of the layer, and one more"


def test_layers_have_a_rate_and_an_eta_when_one_after_the_first_is_done() -> None:
    clock = Clock()
    counts = begun(clock, Extent({"calibrate": (400, 0)}, layer_tokens=100))
    meter = counts.meters["calibrate"]
    clock.every(1, lambda: counts.tokens_computed(10), times=10)
    assert (meter.rate, counts.seconds_left) == (None, None), "a dense layer says little of those with experts"
    clock.every(10, lambda: counts.tokens_computed(10), times=9)
    assert counts.seconds_left is None
    clock.every(10, lambda: counts.tokens_computed(10), times=1)
    assert (meter.rate, counts.seconds_left) == (36, 200)
    clock.now += 60
    assert counts.seconds_left == 140
    clock.now += 600
    assert (counts.seconds_left, meter.rate) == (100, 36), "a step of hours that reports nothing is usual"


@pytest.mark.parametrize("phase", ["calibrate", "evaluate"])
def test_lines_of_layers_begin_without_an_eta(phase: str) -> None:
    clock = Clock()
    counts = begun(clock, Extent({phase: (400, 0)}, layer_tokens=100))  # type: ignore[dict-item]
    assert "ETA" not in counts.line()
    clock.every(0.01, lambda: counts.tokens_computed(50), times=3)
    clock.now += 500
    layers = 3 if phase == "evaluate" else 4  # its head is no layer
    assert counts.line() == f"{phase}: 37 % (1 of {layers} layers)"
