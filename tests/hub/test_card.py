"""The card of a source is read and carried over, and the library accepts the card of a result."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command import cli_environment
from loopback import LoopbackHub

from k2convert.hub.source_card import read_source_card
from k2convert.report.card import render_card
from k2convert.report.figures import collect_report

VALIDATE = """
import sys
from huggingface_hub import ModelCard, get_session, set_client_factory

def to_loopback(request):  # client 1.x asks huggingface.co whatever HF_ENDPOINT says
    request.url = request.url.copy_with(scheme="http", host="127.0.0.1", port=int(sys.argv[2]))

client = type(get_session())
set_client_factory(lambda: client(event_hooks={"request": [to_loopback]}))
ModelCard.load(sys.argv[1]).validate()
"""


def test_card_passes_the_librarys_own_validation(local_result: Path, server: LoopbackHub, tmp_path: Path) -> None:
    report = collect_report(folder=local_result, name="me/out")
    config = json.loads((local_result / "config.json").read_text())
    card = render_card(
        report,
        base_model="moon/K2",
        source=read_source_card("---\nlicense: mit\n---\n"),
        config=config,
    )
    (tmp_path / "README.md").write_text(card)
    arguments = [sys.executable, "-c", VALIDATE, str(tmp_path / "README.md"), server.url.rpartition(":")[2]]
    subprocess.run(arguments, env=cli_environment(), check=True)
    assert len(server.traffic.matching("POST", "validate-yaml")) == 1
    (tmp_path / "README.md").write_text(card.replace("license: mit", "license: mine"))
    assert subprocess.run(arguments, env=cli_environment(), capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize("before", ["\ufeff", "\n", "\r\n\r\n", "\ufeff\n"])
def test_text_before_the_front_matter_does_not_hide_the_license(before: str) -> None:
    assert read_source_card(f"{before}---\nlicense: mit\n---\n# x\n").licence == "mit"


@pytest.mark.parametrize("text", ["", "# no front matter", "---\nlicense: [mit]\n---\n", "---\n: bad\n---\n"])
def test_strange_source_cards_do_not_stop_a_job(text: str) -> None:
    assert read_source_card(text).licence in (None, "mit")
