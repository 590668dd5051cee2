"""The page in a real browser: nothing is cut off at 390 and 1280 px, light and dark, and nothing may run."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from k2convert.report import ReportFiles
from k2convert.report.charts import PALETTE, Color

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-default-apps", "--disable-sync", "--no-first-run", "--hide-scrollbars", "--enable-logging=stderr",
    # No name resolves: a page that requests something would report it in its log.
    "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
DARK = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium is installed")


def _run(page: Path, work: Path, *flags: str) -> tuple[str, list[str]]:
    assert EXECUTABLE is not None
    profile = work / "profile"
    command = [EXECUTABLE, *_FLAGS, f"--user-data-dir={profile}", *flags, page.absolute().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    shutil.rmtree(profile, ignore_errors=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def dump_dom(page: Path, work: Path) -> tuple[str, list[str]]:
    """Return the document after its script ran, and the lines of the browser's log that come from the page."""
    return _run(page, work, "--dump-dom", "--allow-file-access-from-files")


def screenshot(page: Path, work: Path, *, width: int, height: int, dark: bool = False) -> NDArray[np.uint8]:
    """Return the page as pixels, [height, width, 3]."""
    target = work / "shot.png"
    _run(page, work, f"--screenshot={target}", f"--window-size={width},{height}", *(DARK if dark else ()))
    with Image.open(target) as image:
        return np.asarray(image.convert("RGB"))


def count(pixels: NDArray[np.uint8], color: Color, *, dark: bool) -> int:
    """Count the pixels of a color of the palette, within rounding."""
    code = PALETTE[color][dark]
    rgb = np.array([int(code[i : i + 2], 16) for i in (1, 3, 5)], dtype=np.float64)
    return int((np.abs(pixels.astype(np.float64) - rgb) <= 2.0).all(axis=2).sum())


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_charts_have_the_colors_of_the_mode(evaluated: ReportFiles, tmp_path: Path, width: int, dark: bool) -> None:
    painted = screenshot(evaluated.page, tmp_path, width=width, height=5000, dark=dark)
    assert count(painted, "paper", dark=dark) > 0.5 * painted.shape[0] * painted.shape[1]
    page = tmp_path / "page.html"
    page.write_text(re.sub(r"<svg.*?</svg>", "", evaluated.page.read_text(), flags=re.DOTALL))
    without = screenshot(page, tmp_path, width=width, height=5000, dark=dark)
    for color in ("ours", "max"):
        assert count(painted, color, dark=dark) > 100 + count(without, color, dark=dark), color


def test_the_page_has_no_complaints_and_nothing_in_it_may_run(reported: ReportFiles, tmp_path: Path) -> None:
    _, complaints = dump_dom(reported.page, tmp_path)
    assert complaints == []
    page = tmp_path / "injected.html"
    injected = '<script>document.title = "taken"</script><img src="x" onerror="document.title = \'taken\'"></body>'
    page.write_text(reported.page.read_text().replace("</body>", injected))
    document, complaints = dump_dom(page, tmp_path)
    assert "<title>taken" not in document
    assert any("Content Security Policy" in line for line in complaints)


def with_script(files: ReportFiles, page: Path, script: str) -> Path:
    """Write a copy of the page with a script, and so without the policy, which allows none."""
    text = re.sub(r"<meta http-equiv=[^>]*>", "", files.page.read_text())
    page.write_text(text.replace("</body>", f'<script>addEventListener("load", () => {{{script}}})</script></body>'))
    return page


MEASURE = """
    for (const folded of document.querySelectorAll("details")) folded.open = true;
    const width = document.documentElement.clientWidth;
    const inside = (box) => box.left >= 0 && box.right <= width + 1;
    const wide = [...document.querySelectorAll("main > :not(details), .scroll, svg, li")]
        .filter((element) => !inside(element.getBoundingClientRect())).map((element) => element.outerHTML.slice(0, 80));
    const fonts = [...document.querySelectorAll("svg")].map((svg) =>
        svg.getBoundingClientRect().width / svg.viewBox.baseVal.width * 12);
    const cut = [...document.querySelectorAll("svg")].flatMap((svg) => {
        const sheet = svg.getBoundingClientRect();
        return [...svg.querySelectorAll("text")].filter((text) => {
            const box = text.getBoundingClientRect();
            return box.left < sheet.left - 1 || box.right > sheet.right + 1 || box.bottom > sheet.bottom + 1;
        }).map((text) => text.textContent);
    });
    document.title = JSON.stringify([document.documentElement.scrollWidth, wide, cut, fonts]);
"""


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ["evaluated", "reported"])
@pytest.mark.parametrize("width", [390, 1280, 320])
def test_every_screen_shows_everything(name: str, tmp_path: Path, width: int, request: pytest.FixtureRequest) -> None:
    """Nothing is wider than the screen, no word of a chart is cut off, and charts can be read."""
    files: ReportFiles = request.getfixturevalue(name)
    with_script(files, tmp_path / "measured.html", MEASURE)
    listen = "onload=\"document.title = 'found ' + this.contentDocument.title\""
    (tmp_path / "frame.html").write_text(f'<iframe width="{width}" height="800" src="measured.html" {listen}></iframe>')
    (title,) = re.findall(r"<title>found (.*)</title>", dump_dom(tmp_path / "frame.html", tmp_path)[0])
    whole, wide, cut, fonts = json.loads(title)
    assert whole == width
    assert wide == []
    assert cut == []
    assert len(fonts) == (2 if name == "reported" else 4)
    assert min(fonts) >= (10 if width >= 390 else 8)
