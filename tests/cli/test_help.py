"""`k2convert --help`: each verb in one whole line."""

import re
import subprocess
from collections.abc import Callable

RunCli = Callable[..., subprocess.CompletedProcess[str]]


def test_every_summary_is_a_whole_sentence_in_80_columns(run_cli: RunCli) -> None:
    done = run_cli("--help", COLUMNS="80")
    assert done.returncode == 0
    summaries = re.findall(r"^  ([a-z]+) {2,}(\S.*)$", done.stdout.partition("Commands:\n")[2], flags=re.MULTILINE)
    assert len(summaries) == 9
    for verb, summary in summaries:
        assert summary.endswith("."), verb
        assert not summary.endswith("..."), verb
        assert max(map(len, done.stdout.splitlines())) <= 80
