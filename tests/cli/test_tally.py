"""Rates over the last seconds, and an ETA only when there is one."""

import json
from collections.abc import Callable

import pytest

from k2convert.cli.progress import _Lines
from k2convert.cli.tally import Meter, Tally
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


def started(total: int, clock: Clock) -> Meter:
    meter = Meter(total, clock=clock)
    meter.start()
    return meter


def test_the_rate_is_that_of_the_last_seconds_not_since_the_start() -> None:
    clock = Clock()
    meter = started(1_000_000, clock)
    clock.every(1, lambda: meter.add(10), times=600)
    assert meter.rate == 10
    clock.every(1, lambda: meter.add(1000), times=30)
    assert meter.rate == 1000, "the first ten minutes were slow, the last half minute is not"
    assert meter.seconds_left == (1_000_000 - 36_000) * 630 / 36_000, "the ETA is by all that was done"


def test_there_is_no_eta_without_data_and_none_for_a_line_that_stands_still() -> None:
    clock = Clock()
    meter = started(1000, clock)
    assert (meter.rate, meter.seconds_left) == (None, None)
    clock.now += 0.1
    meter.add(10)
    assert (meter.rate, meter.seconds_left) == (None, None), "a tenth of a second says nothing"
    clock.every(1, lambda: meter.add(10), times=10)
    assert meter.seconds_left is not None
    clock.now += 120
    assert (meter.rate, meter.seconds_left) == (0.0, None)


def test_whole_shards_that_arrive_rarely_still_have_a_rate_between_them() -> None:
    clock = Clock()
    meter = started(62 * 9_600, clock)
    clock.every(80, lambda: meter.add(9_600), times=4)
    clock.now += 40
    rate = meter.rate
    assert rate is not None
    assert 80 < rate < 120


def test_what_an_earlier_run_did_counts_as_done_but_not_as_fast() -> None:
    clock = Clock()
    meter = started(1000, clock)
    clock.every(1, lambda: meter.add(10), times=5)
    meter.add(500, is_new=False)
    assert meter.done == 550
    assert meter.rate == 10
    meter.add(-500, is_new=False)
    assert meter.done == 50


def test_the_eta_of_a_job_is_that_of_its_slowest_phase_and_of_a_validation_the_sum() -> None:
    clock = Clock()
    extent = Extent({"download": (1000, 0), "convert": (1000, 0)})
    job = Tally(extent, note=print, clock=clock)
    job.begun(extent)
    for _ in range(5):
        clock.now += 1
        job.transferred(downloaded=100)
        assert job.seconds_left is None, "nothing was converted yet"
    clock.every(1, lambda: job.progress(bytes_in=50), times=6)
    assert job.seconds_left == (1000 - 300) / 50

    extent = Extent({"check": (1000, 0)}, num_experts=100)
    check = Tally(extent, note=print, clock=clock)
    check.begun(extent)
    clock.every(1, lambda: check.progress(bytes_in=100), times=5)
    assert check.seconds_left is None, "no layer was computed yet"
    clock.every(1, lambda: check.progress(bytes_in=100), times=5)
    assert [round(meter.share, 2) for meter in check.meters.values()] == [1.0, 0.0], "layers are still to come"
    for done in range(1, 9):
        clock.now += 1
        check.experts_computed(1, done, 100)
    assert check.seconds_left is not None
    assert 80 < check.seconds_left < 120


def test_from_the_third_shard_on_the_eta_of_a_job_with_the_hub_is_right_within_a_fifth() -> None:
    """As K2's went: 62 shards of 68 s. Each is fetched, converted in 35 s, then sent at once in the end."""
    num_shards, pace, size = 62, 68, 1000
    clock = Clock()
    extent = Extent(dict.fromkeys(("download", "convert", "upload"), (num_shards * size, 0)), num_shards)
    tally = Tally(extent, note=print, clock=clock)
    tally.begun(extent)
    steps = [(pace * n + 6 * i, "download") for n in range(num_shards) for i in range(1, 11)]
    steps += [(pace * n + 78 + 3.5 * i, "convert") for n in range(num_shards) for i in range(1, 11)]
    steps += [(pace * n + 201, "upload") for n in range(num_shards)]
    sent = 0
    for at, phase in sorted(steps):
        clock.now = at
        if phase == "convert":
            tally.progress(bytes_in=size // 10)
        elif phase == "download":
            tally.transferred(downloaded=size // 10)
        else:
            sent += 1
            tally.transferred(uploaded=size)
        if sent < 2:
            assert tally.seconds_left is None
        elif 3 <= sent < num_shards:
            truth = pace * (num_shards - 1) + 201 - at
            assert tally.seconds_left == pytest.approx(truth, rel=0.2), (sent, phase)


def test_the_summary_for_status_survives_json() -> None:
    kept: list[str] = []
    tally = Tally(Extent({"convert": (1000, 0)}, 5, 2), note=print)
    tally.begun(Extent({"convert": (1000, 0)}, 5, 2), keep=kept.append)
    assert json.loads(kept[-1]) == tally.summary()


def test_work_that_waits_for_a_calibration_is_not_stalled_and_has_no_say_in_its_eta() -> None:
    clock = Clock()
    extent = Extent({"calibrate": (400, 100), "convert": (1000, 500)}, layer_tokens=100)
    tally = Tally(extent, note=print, clock=clock)
    tally.begun(extent)
    clock.every(10, lambda: tally.tokens_computed(10), times=10)
    tally.progress(bytes_in=100)
    clock.now += 5
    tally.progress(bytes_in=100)
    clock.every(10, lambda: tally.tokens_computed(10), times=6)
    assert tally.meters["convert"].rate is None, "it waits for the next layer"
    assert tally.meters["calibrate"].rate == 36, "a layer took 100 s"
    assert tally.seconds_left == 135, "what is left of the layer, and one more"
    summary = tally.summary()
    assert summary["phases"]["calibrate"]["unit"] == 100
    assert json.loads(json.dumps(summary)) == summary


def test_a_layer_pass_has_a_rate_and_an_eta_only_when_a_layer_like_the_others_is_done() -> None:
    clock = Clock()
    extent = Extent({"calibrate": (400, 0)}, layer_tokens=100, layer_costs=(1.0, 10.0, 10.0, 10.0))
    tally = Tally(extent, note=print, clock=clock)
    tally.begun(extent)
    meter = tally.meters["calibrate"]
    clock.every(1, lambda: tally.tokens_computed(10), times=10)
    assert (meter.rate, tally.seconds_left) == (360, None), "a dense layer says little of those with experts"
    clock.every(10, lambda: tally.tokens_computed(10), times=9)
    assert tally.seconds_left is None
    assert round(meter.share, 3) == round(10 / 31, 3), "operations, not layers"
    clock.every(10, lambda: tally.tokens_computed(10), times=1)
    assert tally.seconds_left == 200
    clock.now += 60
    assert tally.seconds_left == 140
    clock.now += 600
    assert (tally.seconds_left, meter.rate) == (100, meter.rate), "a step that reports nothing is not stalled"
    assert meter.rate is not None
    assert meter.rate > 60


def test_lines_of_computing_never_say_stalled_and_small_jobs_have_no_eta_of_zero() -> None:
    clock = Clock()
    for phase, total in (("calibrate", 400), ("evaluate", 400)):
        extent = Extent({phase: (total, 0)}, layer_tokens=100)
        tally = Tally(extent, note=print, clock=clock)
        tally.begun(extent)
        lines = _Lines("calibrate", tally)
        assert "ETA" not in lines.text()
        clock.every(0.01, lambda tally=tally: tally.tokens_computed(50), times=3)
        assert "ETA" not in lines.text()
        clock.now += 500
        assert "stalled" not in lines.text()
        assert lines.text().startswith(f"{phase}: 37 % (1 of {4 - (phase == 'evaluate')} layers)")
    extent = Extent({"check": (1000, 0)}, num_experts=100)
    tally = Tally(extent, note=print, clock=clock)
    tally.begun(extent)
    clock.every(1, lambda: tally.progress(bytes_in=10), times=5)
    clock.every(1, lambda: tally.experts_computed(1, 1, 100), times=5)
    clock.now += 500
    assert _Lines("validate", tally).text().count("stalled") == 1, "the disk's"
