"""The functions of the package with the Hub: nothing becomes public by accident, and the library stays as it was."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from loopback import LoopbackHub

import k2convert
from k2convert.errors import ArgumentError, HubError


@pytest.mark.parametrize("private", [None, 0, "", "no", "False", [], 1, "yes"])
def test_only_false_makes_a_repository_public(tiny_hub: LoopbackHub, private: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^private .*: expected True or False\.$"):
        k2convert.convert("hf://moon/tiny", "hf://me/out", private=private)
    assert "me/out" not in tiny_hub.store.repos


@pytest.mark.slow
def test_private_is_the_default(tiny_hub: LoopbackHub, cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cwd)
    k2convert.convert("hf://moon/tiny", "hf://me/out")
    assert tiny_hub.store.repos["me/out"].private
    k2convert.convert("hf://moon/tiny", "hf://me/open", private=False)
    assert not tiny_hub.store.repos["me/open"].private
    with pytest.raises(HubError, match="is public, but a private repository was requested"):
        k2convert.convert("hf://moon/tiny", "hf://me/open")


@pytest.mark.parametrize("name", ["any_text", "verify"])
def test_other_flags_are_checked_too(name: str, tmp_path: Path) -> None:
    functions: dict[str, tuple[Any, int]] = {"any_text": (k2convert.evaluate, 3), "verify": (k2convert.convert, 2)}
    function, count = functions[name]
    for value in (None, "no", 0):
        with pytest.raises(ArgumentError, match=f"^{name} .*: expected True or False"):
            function(*(tmp_path, tmp_path / "out", "text.txt")[:count], **{name: value})


@pytest.fixture
def bars() -> Iterator[None]:
    yield
    enable_progress_bars()


@pytest.mark.slow
@pytest.mark.usefixtures("bars")
@pytest.mark.parametrize("setting", ["as imported", "off", "one is off"])
def test_progress_bars_of_the_library_are_as_before(tiny_hub: LoopbackHub, tmp_path: Path, setting: str) -> None:
    enable_progress_bars()
    if setting == "off":
        disable_progress_bars()
    elif setting == "one is off":
        disable_progress_bars("my.bars")
    before = [are_progress_bars_disabled(name) for name in (None, "my.bars")]
    k2convert.inspect("hf://moon/tiny")
    assert [are_progress_bars_disabled(name) for name in (None, "my.bars")] == before
    with pytest.raises(HubError):
        k2convert.inspect("hf://moon/missing")
    k2convert.convert("hf://moon/tiny", tmp_path / "out")
    k2convert.validate(tmp_path / "out", "hf://moon/tiny")
    assert [are_progress_bars_disabled(name) for name in (None, "my.bars")] == before
