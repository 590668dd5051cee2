"""Headless Chromium: what a reader would see of a page, what its script did, and its log."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-default-apps", "--disable-sync", "--no-first-run", "--hide-scrollbars", "--enable-logging=stderr",
    # No name resolves: a page that requests something would report it in its log.
    "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
DARK = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")


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
