"""What looks like a repository but is not written as one is refused at once, with the right spelling."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import messages_of, run_here

from k2convert.cli.options import check_new_place, check_source
from k2convert.errors import HubError

ADDRESSES = {
    "hf:/x": "hf://owner/name",
    "hf:x": "hf://owner/name",
    "HF://x": "hf://owner/name",
    "hf:": "hf://owner/name",
    "hf:/me/out": "hf://me/out",
    "hf:me/out": "hf://me/out",
    "hf//me/out": "hf://me/out",
    "HF://me/out@v1": "hf://me/out@v1",
    "https://huggingface.co/moonshotai/Kimi-K2-Thinking": "hf://moonshotai/Kimi-K2-Thinking",
    "https://huggingface.co/me/out/tree/v2": "hf://me/out@v2",
    "https://huggingface.co/me/out?library=vllm": "hf://me/out",
    "http://localhost:8080/me/out/": "hf://me/out",
    "huggingface.co/me/out": "hf://me/out",
    "https://huggingface.co/me": "hf://owner/name",
    "s3://bucket/model": "hf://owner/name",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to work in, and a Hub that nobody may ask."""
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.setblocking(False)
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        yield tmp_path
        with pytest.raises(BlockingIOError):
            hub.accept()  # nobody called


def refused(*words: str | Path) -> str:
    """Run a command that must end at once in one line and exit code 1, and return the line."""
    done = run_here(*words)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert messages_of(done.stderr).startswith("error: ")
    assert messages_of(done.stderr).count("\n") == 1
    return done.stderr


@pytest.mark.parametrize("text", ADDRESSES)
def test_a_misspelled_address_is_refused_with_the_right_spelling(text: str, here: Path, tiny: Path) -> None:
    for words in (["run", tiny, text], ["run", text, "out"], ["inspect", text]):
        assert f"Write {ADDRESSES[text]}." in refused(*words)
    assert list(here.iterdir()) == []


def test_owner_and_name_as_a_destination_could_be_both(here: Path, tiny: Path) -> None:
    message = refused("run", tiny, "me/out", "--dry-run")
    assert "./me/out" in message
    assert "hf://me/out" in message
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("text", ["./me/out", "there/out", "out", "me/out/deep", "../me/out", "/me/out", "me/out/"])
def test_what_is_clearly_a_folder_may_be_a_destination(text: str, here: Path) -> None:
    (here / "there").mkdir()
    check_new_place(text)


@pytest.mark.parametrize(
    "text", ["hf://me/out", "hf://me/out@v1", "me", "/me/out", "./me/out", "a/b/c", "there/out", "hf:/x"]
)
def test_a_source_is_an_address_or_a_path_or_any_folder_that_exists(text: str, here: Path) -> None:
    (here / "there" / "out").mkdir(parents=True)
    (here / "hf:" / "x").mkdir(parents=True)
    check_source(text)


@pytest.mark.parametrize(
    "words",
    [
        "run X out", "run X hf://me/out --yes", "inspect X", "validate X", "validate . --source X", "report X",
        "report . --source X", "status X",
    ],
)  # fmt: skip
def test_owner_and_name_as_a_source_are_refused_without_the_network(words: str, here: Path) -> None:
    message = refused(*words.replace("X", "Kimi-K2/Thinkin").split())
    assert "Kimi-K2/Thinkin: no such folder." in message
    assert "hf://Kimi-K2/Thinkin" in message


def test_publish_takes_a_folder_and_a_repository(here: Path) -> None:
    assert "not a folder of this machine" in refused("publish", "hf://me/out", "--repo", "me/out")
    assert "Write hf://me/out." in refused("publish", ".", "--repo", "https://huggingface.co/me/out")
    assert "./me/report" in refused("report", ".", "--out", "me/report")


@pytest.mark.parametrize("text", ["x" * 300 + "/y", "a\0b/c", "a/\udcff"])
def test_hostile_text_that_is_no_address_is_a_path(text: str, here: Path) -> None:
    check_source(text)
    check_new_place(text)


def test_a_long_address_is_cut_in_the_message(here: Path) -> None:
    with pytest.raises(HubError, match=r"hf:x{30}.*: neither") as refusal:
        check_source("hf:" + "x" * 5_000)
    assert len(str(refusal.value)) < 160
    with pytest.raises(HubError) as refusal:
        check_source("hf:/x\n\x1b[31my")
    assert "\n" not in str(refusal.value)
    assert "\x1b" not in str(refusal.value)
