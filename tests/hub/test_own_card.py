"""A card that its owner wrote stays, in the folder and in the repository: only fields that it lacks are added."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from command import RunCli, messages_of, run_here
from evaluation_makers import evaluation_of, write_evaluation
from loopback import LoopbackHub
from loopback_store import Entry
from published import JOB

from k2convert.hub.client import Hub
from k2convert.hub.own_card import card_to_commit, is_by_hand, marked
from k2convert.hub.source_card import read_source_card

TEXT = "\n# My model\n\nTrained by hand. | a | b |\n---\nThe end.\n"
BY_HAND = f"---\nlicense: apache-2.0  # asked our lawyer\ntags: [mine]\n---\n{TEXT}"
WORDS = "README.md: yours, its metadata is completed"


@pytest.fixture
def out(local_result: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(local_result, tmp_path / "out"))


def put(server: LoopbackHub, card: bytes) -> None:
    """Write the card of me/out, as in the browser."""
    if "me/out" not in server.store.repos:
        server.store.create("me/out", private=True)
    repo = server.store.repos["me/out"]
    repo.commit("main", repo.files() | {"README.md": Entry(len(card), card)})


def card_of(server: LoopbackHub) -> str:
    return server.store.read("me/out", "README.md").decode()


def parts(card: str) -> tuple[dict[str, object], str]:
    _, matter, text = card.split("---\n", 2)
    return yaml.safe_load(matter), text


def assert_completed(card: str) -> None:
    fields, text = parts(card)
    assert text == TEXT
    assert "license: apache-2.0  # asked our lawyer\ntags: [mine]\n" in card, "what it had is as it was"
    assert (fields["license"], fields["tags"]) == ("apache-2.0", ["mine"])
    assert (fields["library_name"], fields["pipeline_tag"]) == ("transformers", "text-generation")
    assert "license_name" not in fields


@pytest.mark.quick(1)
@pytest.mark.parametrize("location", ["folder", "repository", "both"])
def test_a_card_by_hand_stays(server: LoopbackHub, cli: RunCli, out: Path, location: str) -> None:
    """That of the folder replaces that of the repository, and this is said."""
    if location != "folder":
        put(server, BY_HAND.encode() if location == "repository" else b"# Another\n")
    if location != "repository":
        (out / "README.md").write_text(BY_HAND)
    words = f"{WORDS}. It replaces the one of me/out\n" if location == "both" else f"{WORDS}\n"
    assert words in messages_of(cli("publish", out, "--repo", "me/out", "--yes", code=0).stderr)
    assert_completed(card_of(server))
    if location != "repository":
        assert (out / "README.md").read_text() == BY_HAND
    write_evaluation(out, evaluation_of(out))
    cli("publish", out, "--repo", "me/out", "--yes", code=0)
    assert_completed(card_of(server))


@pytest.mark.slow
def test_a_job_from_hub_to_hub_keeps_it(tiny_hub: LoopbackHub, cli: RunCli) -> None:
    put(tiny_hub, BY_HAND.encode())
    assert f"note: {WORDS}" in cli(*JOB, "--dry-run", code=0).stderr
    assert f"note: {WORDS}" in cli(*JOB, code=0).stderr
    assert_completed(card_of(tiny_hub))
    fields, _ = parts(card_of(tiny_hub))
    assert (fields["base_model"], fields["base_model_relation"]) == ("moon/tiny", "quantized")
    assert json.loads(cli("validate", "hf://me/out", "--json", code=0).stdout)["passed"]


def test_front_matter_alone_gets_a_text(server: LoopbackHub, cli: RunCli, out: Path) -> None:
    """As a repository has it that was created in the browser with a license."""
    put(server, b"---\nlicense: apache-2.0\n---\n")
    assert "yours" not in cli("publish", out, "--repo", "me/out", "--yes", code=0).stderr
    fields, text = parts(card_of(server))
    assert fields["license"] == "apache-2.0"
    assert "## Error of the weights" in text
    assert not is_by_hand(card_of(server))


@pytest.mark.slow
def test_a_card_is_written_again_until_somebody_edits_it(server: LoopbackHub, cli: RunCli, out: Path) -> None:
    cli("publish", out, "--repo", "me/out", "--yes", code=0)
    first = card_of(server)
    assert not is_by_hand(first)
    write_evaluation(out, evaluation_of(out))
    (out / "README.md").write_text(first)  # as `hf download` leaves it
    assert "yours" not in cli("publish", out, "--repo", "me/out", "--yes", code=0).stderr
    assert "## Evaluation of the whole model" in card_of(server)
    edited = card_of(server).replace("## Hardware", "Ask me before you use it.\n\n## Hardware")
    put(server, edited.encode())
    (out / "README.md").unlink()
    write_evaluation(out, replace(evaluation_of(out), tool_version="0.2.1"))
    assert WORDS in cli("publish", out, "--repo", "me/out", "--yes", code=0).stderr
    assert card_of(server) == edited


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "card", [b"caf\xe9, no UTF-8\n", b"---\nlicense: [mit\n---\nbroken\n", b"---\n- mit\n---\nx\n"]
)
def test_a_card_that_cannot_be_completed_stays(server: LoopbackHub, cli: RunCli, out: Path, card: bytes) -> None:
    put(server, card)
    cli("publish", out, "--repo", "me/out", "--yes", code=0)
    assert server.store.read("me/out", "README.md") == card
    assert "config.json" in server.store.repos["me/out"].files()


@pytest.mark.parametrize("matter", ["license: [mit", "license: mine"])
def test_a_card_that_the_hub_refuses_is_refused_early(server: LoopbackHub, cli: RunCli, out: Path, matter: str) -> None:
    (out / "README.md").write_text(f"---\n{matter}\n---\n# Mine\n")
    error = messages_of(cli("publish", out, "--repo", "me/out", "--yes", code=1).stderr)
    assert f"{out}/README.md: the Hub does not accept its metadata. Correct" in error
    assert "me/out" not in server.store.repos


@pytest.mark.parametrize(
    "card",
    [
        "# Mine\n",
        "\ufeff---\nlicense: mit\n---\nMine\n",
        "---\r\nlicense: mit\r\n---\r\nMine\r\n",
        "---\n---\nMine\n",
        "---\n{license: mit}\n---\nMine\n",
        "---\nbase_model: my/other\n---\nMine\n",
        "\n\n---\nlicense: mit\n...\n---\nMine\n",
    ],
)
def test_every_form_of_front_matter_is_completed(server: LoopbackHub, hub: Hub, card: str) -> None:
    generated = marked(
        "---\nlicense: other\nlicense_name: x\nbase_model: a/b\nbase_model_relation: quantized\n---\n# Made\n"
    )
    completed = card_to_commit(hub, generated.encode(), here=card, there=None)
    assert completed is not None
    fields, text = parts(completed.decode())
    assert text.strip().endswith("Mine")
    assert fields["license"] == ("mit" if "mit" in card else "other")
    assert ("license_name" in fields) == ("mit" not in card)
    assert fields["base_model"] == ("my/other" if "my/other" in card else "a/b")
    assert ("base_model_relation" in fields) == ("my/other" not in card)
    again = card_to_commit(hub, generated.encode(), here=None, there=completed.decode())
    assert again is None, "complete: the repository's stays as it is"


def test_logs_are_not_published(server: LoopbackHub, cli: RunCli, out: Path) -> None:
    """A log of the command itself grows while it is published."""
    for name in ("convert.log", "slurm-17.out", "slurm-17.err"):
        (out / name).write_text("a line\n")
    (out / "lost+found").mkdir()
    (out / "lost+found" / "7").write_text("a piece")
    (out / "notes.txt").write_text("a note")
    done = cli("publish", out, "--repo", "me/out", "--yes", code=0)
    assert "notes.txt" in done.stderr
    files = server.store.repos["me/out"].files()
    assert "notes.txt" in files
    assert not [name for name in files if name.startswith(("convert", "slurm", "lost"))]


def listed(errors: str) -> set[str]:
    (line,) = (line for line in messages_of(errors).splitlines() if "and these files: " in line)
    return set(line.partition("and these files: ")[2].split(", "))


@pytest.mark.quick(1)
@pytest.mark.parametrize("moment", ["no report", "a fresh report", "a stale report", "a part of a report"])
def test_the_published_report_knows_the_evaluation(server: LoopbackHub, cli: RunCli, out: Path, moment: str) -> None:
    """And every file that is published is listed."""
    if moment == "a stale report":
        run_here("report", out, code=0)
    write_evaluation(out, evaluation_of(out))
    if moment in ("a fresh report", "a part of a report"):
        run_here("report", out, code=0)
    if moment == "a part of a report":
        (out / "report.md").unlink()
    done = cli("publish", out, "--repo", "me/out", "--yes", code=0)
    for name in ("report.html", "report.md", "README.md"):
        assert "Evaluation of the whole model" in server.store.read("me/out", name).decode(), name
    shards = {path.name for path in out.glob("*.safetensors")}
    assert listed(done.stderr) == server.store.repos["me/out"].files().keys() - shards - {".gitattributes"}
    if moment == "a fresh report":
        assert server.store.read("me/out", "report.html") == (out / "report.html").read_bytes()


@pytest.mark.parametrize("before", ["\ufeff", "\n", "\r\n\r\n", "\ufeff\n"])
def test_text_before_the_front_matter_does_not_hide_the_license(before: str) -> None:
    assert read_source_card(f"{before}---\nlicense: mit\n---\n# x\n").licence == "mit"


@pytest.mark.parametrize("text", ["", "# no front matter", "---\nlicense: [mit]\n---\n", "---\n: bad\n---\n"])
def test_strange_source_cards_do_not_stop_a_job(text: str) -> None:
    assert read_source_card(text).licence in (None, "mit")
