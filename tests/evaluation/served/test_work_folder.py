"""The work folder of a comparison: no link is followed, files of others stay, and no answer passes for another."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from asking import WINDOW, Serve
from command import run_here, said
from sealed_files import edit_sealed

from k2convert.checkpoint import folders
from scripts.engine_checks.model_server import ModelServer, markov


def begun(server: ModelServer, options: list[object], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The work folder of a comparison that had every answer and was then interrupted."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("k2convert.cli.compare.evaluate", interrupted)
        assert run_here("compare", server.url, server.url, *options).returncode == 130
    (work,) = folder.glob("compare-*.work")
    return work


def test_a_link_in_its_place_is_refused_and_not_followed(
    serve: Serve, options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(markov(1))
    work = begun(server, options, tmp_path, monkeypatch)
    shutil.rmtree(work)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    work.symlink_to(elsewhere)
    done = run_here("compare", server.url, server.url, *options, code=1)
    assert f"{work.name}: is a link" in done.stderr
    assert list(elsewhere.iterdir()) == []


def test_files_of_others_in_it_stay(
    serve: Serve, options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(markov(1))
    work = begun(server, options, tmp_path, monkeypatch)
    (work / "a" / "thesis.txt").write_text("the only copy")
    (work / "notes").mkdir()
    (work / "a" / "answers.json").write_text("damaged")
    done = run_here("compare", server.url, server.url, *options, code=0)
    assert f"{work.name}: stays, because it has files that are not from k2convert" in done.stderr
    assert sorted(path.relative_to(work).as_posix() for path in work.rglob("*")) == ["a", "a/thesis.txt", "notes"]


class Killer:
    """Stops a process at one of its removals."""

    def __init__(self, patch: pytest.MonkeyPatch, *, after: int) -> None:
        self.left = after
        self.has_killed = False
        for name in ("unlink", "rmdir"):
            patch.setattr(folders.os, name, self._killing(getattr(folders.os, name)))

    def _killing(self, original: Callable[..., None]) -> Callable[..., None]:
        def remove(*arguments: object, **named: object) -> None:
            if self.left == 0:
                self.has_killed = True
                raise KeyboardInterrupt
            self.left -= 1
            original(*arguments, **named)

        return remove


@pytest.mark.slow
def test_killed_at_every_step_of_its_removal_it_goes_on(
    serve: Serve, options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(markov(1))
    options = [*options, "--tokens", 2 * WINDOW]
    first = run_here("compare", server.url, server.url, *options, code=0).stdout
    steps = 0
    has_killed = True
    while has_killed:
        with monkeypatch.context() as patch:
            killer = Killer(patch, after=steps)
            code = run_here("compare", server.url, server.url, *options).returncode
        has_killed = killer.has_killed
        assert code == (130 if has_killed else 0)
        steps += 1
        again = run_here("compare", server.url, server.url, *options, code=0)
        assert again.stdout == first
        assert list(tmp_path.glob("compare-*.work")) == []
    assert steps > 6, "every answer and its folder"


def test_an_answer_of_another_window_or_server_is_asked_for_again(
    serve: Serve, options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(markov(1))
    run_here("compare", server.url, "--save", "kept", *options, code=0)
    run_here("compare", serve(markov(1), name="another").url, "--save", "other", *options, code=0)
    for name, origin in (("window-002.json", "kept/window-003.json"), ("window-001.json", "other/window-001.json")):
        shutil.copy(tmp_path / origin, tmp_path / "kept" / name)
        assert name in run_here("compare", "kept", server.url, "--quiet", code=1).stderr
        asked = len(server.questions)
        run_here("compare", server.url, "--save", "kept", *options, code=0)
        assert len(server.questions) == asked + 1


@pytest.mark.parametrize(("field", "value"), [("again", 10**9), ("top_k", 10**9), ("top_k", 0)])
def test_questions_that_nobody_asked_are_refused(
    serve: Serve, options: list[object], tmp_path: Path, field: str, value: int
) -> None:
    server = serve(markov(1))
    run_here("compare", server.url, "--save", "kept", *options, code=0)
    edit_sealed(tmp_path / "kept" / "answers.json", lambda document: document.update({field: value}))
    assert "nor a folder of answers" in run_here("compare", "kept", server.url, "--quiet", code=1).stderr


def test_after_a_server_of_another_model_the_right_one_is_compared(
    serve: Serve, options: list[object], tmp_path: Path
) -> None:
    reference = serve(markov(1))
    wrong = serve(markov(1), decode=lambda token: f" x{token}")
    done = run_here("compare", reference.url, wrong.url, *options, code=1)
    assert "different vocabularies" in done.stderr
    (work,) = tmp_path.glob("compare-*.work")
    assert str(work.name) in done.stderr
    wrong.decode = reference.decode
    assert "no difference" in run_here("compare", reference.url, wrong.url, *options, code=0).stdout


def test_messages_shorten_long_addresses(options: list[object]) -> None:
    address = f"http://127.0.0.1:1/{'x' * 5000}"
    done = run_here("compare", address, address, *options, code=1)
    assert len(said(done.stderr)) < 400
