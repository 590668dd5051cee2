"""The page is self-contained, runs only its own script, and stays small for a trillion weights."""

import base64
import hashlib
import json
import re
from datetime import UTC, date, datetime, timedelta
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sealed_files import edit_sealed

from k2convert.checkpoint.index import open_checkpoint
from k2convert.records.document import seal
from k2convert.report import ReportFiles, write_report
from k2convert.report.charts import color_scale, draw_block_scales, draw_heat_maps
from k2convert.report.checks import read_checks
from k2convert.report.content import headline
from k2convert.report.drawing import LIGHT, THEMED, to_svg
from k2convert.report.figures import HeatMap, collect_report
from k2convert.report.page import page_name
from scripts.fixture_maker.damage import edit_json

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'`|&{{ 7*7 }}"


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parse(page: str) -> _Tags:
    parser = _Tags()
    parser.feed(page)
    return parser


def test_page_shows_every_part(reported: ReportFiles) -> None:
    text = re.sub(r"<[^>]+>", "", reported.page.read_text())
    for words in (
        "22.62 dB", "0.506", "19 of 19", "SQNR by layer and expert", "Worst tensors", "Block scales",
        "INT4 codes recoverable", "codes of -8", "Servable contract", "Reference layers", "Provenance",
        "kimi-k2-thinking-nvfp4", "arithmetic version", "model-00005-of-000005.safetensors",
    ):  # fmt: skip
        assert words in text, words


def test_page_is_self_contained(reported: ReportFiles, local_result: Path) -> None:
    found = parse(reported.page.read_text())
    loads = [value for name, value in found.attributes if name in ("src", "href", "xlink:href", "srcset", "data")]
    assert all(value.startswith(("data:image/png;base64,", "#")) for value in loads)
    assert not {"link", "iframe", "object", "embed", "base", "form"} & set(found.tags)
    assert "@import" not in reported.page.read_text()
    for path in (reported.page, reported.markdown):
        assert str(local_result.parent) not in path.read_text(), "a path of this machine"
    assert not re.search(r"url\((?!#)", reported.page.read_text())


def test_policy_allows_exactly_the_pages_script(reported: ReportFiles) -> None:
    page = reported.page.read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert f"script-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'")
    assert "on" not in {name[:2] for name, _ in parse(page).attributes}


def test_same_folder_gives_the_same_bytes(
    local_result: Path, reported: ReportFiles, validation: dict[str, Any], tmp_path: Path
) -> None:
    tensors = open_checkpoint(local_result).tensors.values()
    again = write_report(folder=local_result, out=tmp_path, validation=validation, tensors=tensors)
    for before in filter(None, (reported.page, reported.markdown, reported.picture)):
        assert (tmp_path / before.name).read_bytes() == before.read_bytes()
    assert again.picture is not None


def test_hostile_names_are_shown_and_do_nothing(records_only: Path, tmp_path: Path) -> None:
    record = records_only / ".k2convert/shards/model-00002-of-000005.safetensors.json"

    shard = HOSTILE.replace("/", "")  # a file name cannot contain a slash

    def poison_record(document: dict[str, Any]) -> None:
        worst = document["projections"][0]
        worst["module"] = worst["role"] = HOSTILE
        worst["metrics"]["squared_error"] *= 9
        document["source_headers"] = {HOSTILE: HOSTILE}

    def poison_ledger(document: dict[str, Any]) -> None:
        document["source"].update(repo=HOSTILE, revision=HOSTILE)
        document["versions"] = {HOSTILE: HOSTILE}
        document["shards"][shard] = {"blake3": HOSTILE, "bytes": 1, "tensors": 1}

    edit_sealed(record, poison_record)
    edit_json(records_only / "k2convert.json", poison_ledger)
    copied = json.loads(record.read_text()) | {"shard": shard, "projections": []}
    del copied["checksum"]
    (records_only / f".k2convert/shards/{shard}.json").write_bytes(seal(copied))
    rule = {"number": 1, "title": HOSTILE, "verdict": "fail", "count": 1, "note": HOSTILE}
    rule["offenders"] = [{"name": HOSTILE, "problem": HOSTILE}]
    layer = {"layer": 1, "router_unchanged": False, "failures": [HOSTILE], "errors": []}
    validation = {
        "passed": False,
        "contract": {"rules": [rule], "summary": HOSTILE},
        "layers": {"hidden_states": HOSTILE, "layers": [layer]},
        "weights": None,
        "against": None,
    }
    files = write_report(folder=records_only, out=tmp_path / "out", validation=validation)
    found = parse(files.page.read_text())
    assert found.tags.count("script") == 2
    assert "img" not in found.tags
    assert any(HOSTILE in text for text in found.text)
    markdown = files.markdown.read_text()
    assert not re.search(r"(?<!\\)<(?!/?br)", markdown)
    for line in markdown.splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) in (3, 5, 6, 7, 8, 9), line


def test_charts_follow_the_pages_colors(local_result: Path) -> None:
    report = collect_report(folder=local_result)
    histogram = report.total.scale_histogram
    svg = to_svg(draw_block_scales(histogram, THEMED), label="y")
    assert "var(--ours)" in svg
    assert "var(--warn)" in svg
    assert not re.search(r"#0a0b[0-9a-f]{2}", svg)
    assert "var(--" not in to_svg(draw_block_scales(histogram, LIGHT), label="y")


def k2_sized_maps() -> tuple[HeatMap, ...]:
    values = np.random.default_rng(0)
    return tuple(
        HeatMap(name, tuple(range(1, 61)), 22.6 + 0.05 * values.standard_normal((60, 384)))
        for name in ("gate", "up", "down")
    )


def test_every_cell_of_k2_is_a_pixel() -> None:
    maps = k2_sized_maps()
    svg = to_svg(draw_heat_maps(maps, THEMED), label="y")
    assert len(svg) < 600_000
    for found in maps:
        (data,) = re.findall(rf'<image xlink:href="data:image/png;base64,([^"]*)"[^>]*?id="map-{found.projection}', svg)
        picture = Image.open(BytesIO(base64.b64decode(data)))
        assert picture.size == (60, 384)


def test_one_outlier_does_not_hide_the_rest_of_the_map() -> None:
    maps = k2_sized_maps()
    maps[0].values[3, 7] = 5.0
    scale = color_scale(maps)
    low, high = scale
    assert low > 22.4
    assert scale[low].startswith("≤")
    assert not np.isnan(high)


def test_values_for_the_read_out_are_those_of_the_map(reported: ReportFiles) -> None:
    (data,) = re.findall(r'<script type="application/json" id="cells">(.*?)</script>', reported.page.read_text())
    cells = json.loads(data)
    for found in reported.report.maps:
        values = np.frombuffer(base64.b64decode(cells[found.projection]["values"]), dtype="<u2")
        assert np.array_equal(values.reshape(found.values.shape), np.rint(100 * found.values))
        assert cells[found.projection]["layers"] == list(found.layers)


def test_report_is_titled_by_the_model_and_has_its_day(reported: ReportFiles, local_result: Path) -> None:
    page = reported.page.read_text()
    today = datetime.now(UTC).date()
    assert f"<title>{local_result.name}: INT4 to NVFP4</title>" in page
    assert f"<h1>{local_result.name}</h1>" in page
    (day,) = re.findall(r'k2convert report of <time datetime="([^"]*)">\1</time> \(UTC\)', page)
    assert today - date.fromisoformat(day) <= timedelta(days=1)
    assert f"report made (UTC) | `{day}`" in reported.markdown.read_text()


def test_source_repository_names_the_report(records_only: Path) -> None:
    assert page_name(collect_report(folder=records_only)) == records_only.name
    edit_json(records_only / "k2convert.json", lambda ledger: ledger["source"].update(repo="moonshotai/Kimi-K2"))
    assert page_name(collect_report(folder=records_only)) == "moonshotai/Kimi-K2"


def test_rule_max_is_not_compared_with_itself(records_only: Path, tmp_path: Path) -> None:
    edit_json(records_only / "k2convert.json", lambda ledger: ledger["recipe"].update(rule="max"))
    files = write_report(folder=records_only, out=tmp_path / "out")
    page = files.page.read_text()
    assert "max&#39;s error" not in page
    assert "compared with max" not in page
    assert "this: max: median" in page


def test_rules_that_were_not_checked_do_not_count_as_success(reported: ReportFiles, validation: dict[str, Any]) -> None:
    rules = [dict(rule) for rule in validation["contract"]["rules"]]
    for number, verdict, shown in (
        (6, "pass", ("19 of 19", "good")), (6, "skipped", ("18 of 19", "")), (3, "fail", ("1 broken", "bad"))
    ):  # fmt: skip
        rules[number]["verdict"] = verdict
        checks = read_checks({**validation, "contract": {"rules": rules, "summary": ""}})
        tile = headline(reported.report, checks)[-1]
        assert (tile.value, tile.tone) == shown
