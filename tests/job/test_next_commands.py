"""Every `next:` line is a command that works as it is printed. Commands that serve are only read."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from command import RunCli, messages_of
from command import run_cli as run_process
from damaged_files import damage_file


def next_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("next: ") for line in messages_of(done.stderr).splitlines() if line.startswith("next: ")]
    assert len(lines) <= 1
    return lines[0] if lines else ""


@pytest.fixture
def follow(run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Run a command and, as printed, every one that follows; return the `next:` lines. Works in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str | Path) -> list[str]:
        lines = [next_line(run_cli(*words))]
        while lines[-1].startswith("k2convert ") and "owner/name" not in lines[-1]:
            lines.append(next_line(run_cli(*shlex.split(lines[-1])[1:])))
        return lines

    return run


def test_from_inspect_to_serving(follow: Callable[..., list[str]], k2_shaped: Path, tmp_path: Path) -> None:
    name = "it's my $source"
    (tmp_path / name).symlink_to(k2_shaped)
    quoted = shlex.quote(name)
    options = "--enable-auto-tool-choice --tool-call-parser kimi_k2 --reasoning-parser kimi_k2"
    serve = f"vllm serve DEST --tensor-parallel-size 2 --trust-remote-code {options}"
    assert follow("inspect", name) == [
        f"k2convert run {quoted} DEST --dry-run",
        f"k2convert run {quoted} DEST",
        f"k2convert validate DEST --source {quoted}",
        serve,
    ]
    words = ("run", name, "it's $here", "--rule", "max", "--set", "input_scale.down=0.5")
    assert shlex.split(follow(*words, "--dry-run")[0]) == ["k2convert", *words], "the options of the dry run"
    assert follow("run", name, "bf16", "--set", "target=bf16") == [""]
    assert follow("inspect", "DEST") == [f"k2convert validate DEST --source {quoted}", serve]
    assert follow("status", "DEST") == [f"k2convert validate DEST --source {quoted}", serve]
    assert follow("report", "DEST", "--source", name) == [f"k2convert publish DEST --repo owner/name --source {quoted}"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "flipped, with its time"])
def test_a_failed_validation_names_the_command_that_mends_the_result(
    damage: str, run_cli: RunCli, cut: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_cli("run", cut, "an other's", code=0)
    result = Path("an other's")
    shard = max(result.glob("*.safetensors"))
    written = shard.stat()
    damage_file(shard, damage.partition(",")[0], foreign=cut / "config.json")
    if damage.endswith("time"):
        os.utime(shard, ns=(written.st_atime_ns, written.st_mtime_ns))
    failed = run_cli("validate", result, "--source", cut, code=3)
    line = messages_of(failed.stderr).split("`")[1]
    assert shlex.split(line) == ["k2convert", "run", str(cut), str(result), "--verify"]
    run_cli(*shlex.split(line)[1:], code=0)
    run_cli("validate", result, "--source", cut, code=0)


@pytest.mark.slow
def test_a_report_without_ledger_asks_status(
    follow: Callable[..., list[str]], run_cli: RunCli, k2_shaped: Path, tmp_path: Path
) -> None:
    follow("run", k2_shaped, "out")
    shutil.copytree("out", "cut short")
    for name in ("k2convert.json", "config.json"):
        (tmp_path / "cut short" / name).unlink()
    refused = messages_of(run_cli("report", "cut short", code=1).stderr)
    assert refused.split("`")[1::2] == ["k2convert status 'cut short'"]
    follow("status", "cut short")
    shutil.copytree("out", "emptied", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree("emptied", "records", ignore=shutil.ignore_patterns(".k2convert"))
    assert follow("report", "emptied")[0] == "k2convert status emptied"
    assert follow("report", "records") == [""]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", [b"caf\xc3\xa9 s", b"caf\xe9's", b"a\\ b\nc"])
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_command_can_be_pasted_from_any_terminal(name: bytes, encoding: str, k2_shaped: Path, tmp_path: Path) -> None:
    source = tmp_path / os.fsdecode(name)
    source.symlink_to(k2_shaped)
    line = next_line(run_process("inspect", source, PYTHONIOENCODING=encoding))
    assert line.isascii() or encoding == "utf-8"
    pasted = subprocess.run(["bash", "-c", f"printf %s {line.split(' run ')[1]}"], capture_output=True, check=True)
    assert pasted.stdout == bytes(source) + b"DEST--dry-run"


def test_a_home_in_quotes_is_the_home(run_cli: RunCli, k2_shaped: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "source").symlink_to(k2_shaped)
    done = run_cli("run", "~/source", "~/out", HOME=str(home))
    assert done.returncode == 0, done.stderr
    assert (home / "out" / "config.json").is_file()
    assert run_cli("validate", "~/out", "--source=~/source", HOME=str(home)).returncode == 0
