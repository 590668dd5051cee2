"""The page in a real browser: charts are painted in every size and mode, and the script runs without errors."""

import json
import re
from pathlib import Path

import browser
import numpy as np
import pytest
from matplotlib import colormaps
from numpy.typing import NDArray

from k2convert.report import ReportFiles
from k2convert.report.drawing import COLOR_MAP, DARK, LIGHT, Palette

pytestmark = pytest.mark.skipif(browser.EXECUTABLE is None, reason="no Chromium is installed")

EVALUATION_SIZES = {"wide": (1280, 1900), "telephone": (320, 2600)}
SIZES = {"wide": (1200, 2400), "telephone": (400, 3000)}
ALPHA = 0.3  # of the histograms' areas


def rgb(color: str) -> NDArray[np.float64]:
    return np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)], dtype=np.float64)


def count(pixels: NDArray[np.uint8], color: NDArray[np.float64]) -> int:
    """Count the pixels of a color, within rounding."""
    return int((np.abs(pixels.astype(np.float64) - color) <= 2.0).all(axis=2).sum())


def count_mapped(pixels: NDArray[np.uint8]) -> int:
    """Count the pixels of the heat map's colors, each channel rounded either way."""
    colors = np.array([colormaps[COLOR_MAP](i)[:3] for i in range(256)]) * 255
    nearby = (np.floor(colors)[:, None, :] + np.indices((2, 2, 2)).reshape(3, -1).T).reshape(-1, 3)
    weights = np.array([1 << 16, 1 << 8, 1])
    return int(np.isin(pixels.astype(np.int64) @ weights, nearby.astype(np.int64) @ weights).sum())


def blank_charts(pixels: NDArray[np.uint8], palette: Palette) -> list[str]:
    """Return the charts that are not visible: their areas have colors that nothing else on the page has."""
    blank: list[str] = []
    for name in ("max", "ours"):
        area = ALPHA * rgb(palette[name]) + (1 - ALPHA) * rgb(palette["paper"])
        if count(pixels, area) < 250:
            blank.append(f"distribution: {name}")
    if count(pixels, rgb(palette["ours"])) < 2000:
        blank.append("block scales")
    if count_mapped(pixels) < 20_000:  # the color scale has a tenth of that
        blank.append("heat map")
    return blank


@pytest.mark.slow
@pytest.mark.parametrize(("size", "dark"), [("wide", True), ("wide", False), ("telephone", False)])
def test_charts_are_painted(reported: ReportFiles, tmp_path: Path, size: str, dark: bool) -> None:
    width, height = SIZES[size]
    palette = DARK if dark else LIGHT
    pixels = browser.screenshot(reported.page, tmp_path, width=width, height=height, dark=dark)
    assert count(pixels, rgb(palette["paper"])) > 0.3 * pixels.shape[0] * pixels.shape[1]
    assert not blank_charts(pixels, palette)


@pytest.mark.slow
def test_a_blank_chart_would_be_noticed(reported: ReportFiles, tmp_path: Path) -> None:
    page = tmp_path / "blank.html"
    text = reported.page.read_text()
    text = re.sub(r"<image [^>]*>", "", text)
    text = re.sub(r'<path [^>]*style="fill: var\(--(max|ours)\)[^>]*>', "", text)
    page.write_text(text)
    pixels = browser.screenshot(page, tmp_path, width=1200, height=2400)
    expected = ["distribution: max", "distribution: ours", "block scales", "heat map"]
    assert blank_charts(pixels, LIGHT) == expected


def test_script_runs_without_complaints(reported: ReportFiles, tmp_path: Path) -> None:
    document, complaints = browser.dump_dom(reported.page, tmp_path)
    assert 'data-ready="yes"' in document
    assert "Point at a cell to read it, or press Tab" in document
    assert complaints == []


def test_a_script_error_would_be_noticed(reported: ReportFiles, tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    page.write_text(reported.page.read_text().replace('id="readout"', 'id="elsewhere"'))
    document, complaints = browser.dump_dom(page, tmp_path)
    assert 'data-ready="yes"' not in document
    assert "TypeError" in complaints[0]


def test_only_the_pages_own_script_may_run(reported: ReportFiles, tmp_path: Path) -> None:
    page = tmp_path / "injected.html"
    injected = '<script>document.title = "taken"</script><img src="x" onerror="document.title = \'taken\'"></body>'
    page.write_text(reported.page.read_text().replace("</body>", injected))
    document, complaints = browser.dump_dom(page, tmp_path)
    assert "<title>taken" not in document
    assert any("Content Security Policy" in line for line in complaints)


def with_script(files: ReportFiles, page: Path, script: str) -> Path:
    """Write a copy of the page with another script, and so without the policy, which allows none but its own."""
    text = re.sub(r"<meta http-equiv=[^>]*>", "", files.page.read_text())
    page.write_text(text.replace("</body>", f'<script>addEventListener("load", () => {{{script}}})</script></body>'))
    return page


def test_a_cell_is_read_out_by_arrow_keys_and_by_pointer(reported: ReportFiles, tmp_path: Path) -> None:
    found = next(m for m in reported.report.maps if m.projection == "up")
    layers, experts = found.values.shape
    keys = ["ArrowDown"] * 13 + ["ArrowRight", "x", "Tab"]
    script = f"""
        const image = document.getElementById("map-up"), readout = document.getElementById("readout");
        image.focus();
        if (!document.hasFocus()) image.dispatchEvent(new FocusEvent("focus"));  // not yet in front
        const first = readout.textContent;
        for (const key of {keys}) image.dispatchEvent(new KeyboardEvent("keydown", {{ key, cancelable: true }}));
        const pressed = readout.textContent, box = image.getBoundingClientRect();
        const mark = document.getElementById("cursor").getBoundingClientRect();
        const inside = mark.left >= box.left - 1 && mark.right <= box.right + 1 && mark.top >= box.top - 1;
        const clientX = box.left + {2.5 / layers} * box.width, clientY = box.top + {5.5 / experts} * box.height;
        image.dispatchEvent(new PointerEvent("pointermove", {{ clientX, clientY }}));
        const visible = mark.width > 3 && inside;
        document.title = [first, pressed, readout.textContent, document.activeElement.id, visible].join("; ");
    """
    document, complaints = browser.dump_dom(with_script(reported, tmp_path / "pressed.html", script), tmp_path)
    assert complaints == []
    read = "; ".join(
        f"layer {found.layers[layer]}, expert {expert}, up: {found.values[layer, expert]:.2f} dB"
        for layer, expert in ((0, 0), (1, 13), (2, 5))
    )
    assert re.findall("<title>(.*?)</title>", document) == [f"{read}; map-up; true"]


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", EVALUATION_SIZES)
def test_the_charts_of_an_evaluation_are_painted(evaluated: ReportFiles, tmp_path: Path, size: str, dark: bool) -> None:
    """Both modes are areas in the histogram and lines in the other charts, above everything else on the page."""
    palette, (width, height) = DARK if dark else LIGHT, EVALUATION_SIZES[size]
    page = tmp_path / "page.html"
    text = evaluated.page.read_text()
    page.write_text(text[: text.index("<h2>Every tensor")])
    painted = browser.screenshot(page, tmp_path, width=width, height=height, dark=dark)
    page.write_text(re.sub(r"<svg.*?</svg>", "", page.read_text(), flags=re.DOTALL))
    without = browser.screenshot(page, tmp_path, width=width, height=height, dark=dark)
    for name in ("ours", "max"):
        color = rgb(palette[name])
        area = ALPHA * color + (1 - ALPHA) * rgb(palette["paper"])
        assert count(painted, area) > 1000 * (width / 1280) > 20 * count(without, area), name
        assert count(painted, color) > 150 * (width / 1280) + count(without, color), name


def test_each_chart_of_an_evaluation_has_one_size(evaluated: ReportFiles) -> None:
    """The page scales them: an image has a view box and no width of its own."""
    charts = re.findall(r"<figure>(<svg [^>]*>)", evaluated.page.read_text())
    assert len(charts) == 7
    assert all(re.search(r'viewBox="0 0 352\.8 ', chart) for chart in charts)
    assert not [chart for chart in charts if re.search(r' (width|height)="', chart)]


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", ["reported", "evaluated"])
@pytest.mark.parametrize("width", [320, 360, 390, 1280])
def test_every_screen_shows_everything(name: str, tmp_path: Path, width: int, request: pytest.FixtureRequest) -> None:
    """No table is cut off, nothing is wider than the screen, and half of each chart's text is 7 pixels high."""
    files: ReportFiles = request.getfixturevalue(name)
    script = """
        for (const folded of document.querySelectorAll("details")) folded.open = true;
        const tables = [...document.querySelectorAll(".scroll")].map((table) =>
            table.scrollWidth > table.clientWidth + 1 ? table.textContent.trim().slice(0, 20) : "whole");
        const charts = [...document.querySelectorAll("figure svg")].map((svg) => {
            const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
            const texts = [...svg.querySelectorAll("text")].map((text) => parseFloat(getComputedStyle(text).fontSize));
            return scale * texts.sort((a, b) => a - b)[texts.length >> 1];
        });
        const broken = [...document.querySelectorAll("td.figures:first-child")].filter((cell) => {
            const range = document.createRange();
            range.selectNodeContents(cell);
            return new Set([...range.getClientRects()].map((box) => box.top)).size > 1;
        });
        const texts = broken.map((cell) => cell.textContent);
        document.title = JSON.stringify([tables, document.documentElement.scrollWidth, charts, texts]);
    """
    with_script(files, tmp_path / "measured.html", script)
    listen = "onload=\"document.title = 'found ' + this.contentDocument.title\""
    (tmp_path / "frame.html").write_text(f'<iframe width="{width}" height="800" src="measured.html" {listen}></iframe>')
    (found,) = re.findall(r"<title>found (.*)</title>", browser.dump_dom(tmp_path / "frame.html", tmp_path)[0])
    tables, whole, charts, broken = json.loads(found)
    assert not broken, "a figure is over two lines"
    assert len(tables) >= 5
    assert set(tables) == {"whole"}
    assert whole == width
    assert len(charts) == (3 if name == "reported" else 7)
    assert width < 360 or min(charts) >= 6.95
