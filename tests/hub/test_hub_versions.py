"""A new version of a result: other weights go to a branch of the same repository, and main stays as it is."""

import shutil
from pathlib import Path

import pytest
from command import RunCli, run_here
from loopback import LoopbackHub


@pytest.fixture(scope="module")
def by_max(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint by another rule and in another layout, whose package has one file less."""
    folder = tmp_path_factory.mktemp("max") / "out"
    run_here("run", tiny, folder, "--rule", "max", "--layout", "compressed-tensors", code=0)
    return folder


def assert_version(server: LoopbackHub, result: Path, branch: str, before: str) -> None:
    """The branch has one commit of ours with the result's files and no others; main is as before."""
    repo = server.store.repos["me/out"]
    assert repo.refs.keys() == {"main", branch}
    assert repo.refs["main"] == before
    assert repo.num_commits(branch) == 1
    for path in result.glob("*.safetensors"):
        assert server.store.read("me/out", path.name, branch) == path.read_bytes()
    local = {str(path.relative_to(result)) for path in result.rglob("*") if path.is_file()}
    expected = {name for name in local if not name.startswith(".")}
    written = {"README.md", "report.html", "report.md", "report.png", ".gitattributes"}
    assert expected <= repo.files(branch).keys() <= expected | written
    assert f"vllm serve me/out --revision {branch} " in server.store.read("me/out", "README.md", branch).decode()


@pytest.mark.slow
def test_publish_adds_a_version(server: LoopbackHub, cli: RunCli, cwd: Path, local_result: Path, by_max: Path) -> None:
    server.store.add_folder("me/out", local_result, private=True)
    before = server.store.repos["me/out"].refs["main"]
    shutil.copytree(by_max, cwd / "out")
    refused = cli("publish", "out", "--repo", "me/out", "--yes", code=1)
    assert refused.stderr.endswith("Publish to hf://me/out@v2, or choose a new repository.\n")
    shown = cli("publish", "out", "--repo", "me/out@v2", "--yes", code=0).stderr.splitlines()
    assert shown[-1].startswith("next: vllm serve me/out --revision v2 ")
    assert_version(server, by_max, "v2", before)
    again = cli("publish", "out", "--repo", "hf://me/out@v2", "--yes")
    assert "me/out: v2 already holds this result" in again.stderr
    assert_version(server, by_max, "v2", before)
    checked = cli("validate", "hf://me/out@v2", code=0).stderr.splitlines()
    assert "check 100 %" in " ".join(checked) or "validate: 100 %" in " ".join(checked)
    assert "published as hf://me/out@v2 at commit " in cli("status", "out").stdout


@pytest.mark.slow
def test_a_job_adds_a_version(tiny_hub: LoopbackHub, cli: RunCli, cwd: Path, local_result: Path, by_max: Path) -> None:
    tiny_hub.store.add_folder("me/out", local_result, private=True)
    repo = tiny_hub.store.repos["me/out"]
    before = repo.refs["main"]
    words = ("run", "hf://moon/tiny", "hf://me/out@v2", "--rule", "max", "--layout", "compressed-tensors", "--yes")
    repo.refs["v2"] = before  # as a run leaves it that was killed before its commit
    cli(*words, code=0)
    assert_version(tiny_hub, by_max, "v2", before)
    assert "me/out: v2 already holds this result" in cli(*words).stderr
    work = cwd / "k2convert-work" / "me--out@v2"
    assert cli("status", work, code=0).stderr.splitlines()[-1] == "next: k2convert validate hf://me/out@v2"
    other = cli("run", "hf://moon/tiny", "hf://me/out@v2", "--yes")
    assert "me/out: v2 already holds other weights" in other.stderr


@pytest.mark.parametrize("branch", ["refs/pr/1", "k2convert-0123", "0" * 40])
def test_what_is_no_branch_of_the_user_is_refused(server: LoopbackHub, cli: RunCli, tiny: Path, branch: str) -> None:
    done = cli("run", tiny, f"hf://me/out@{branch}", "--yes")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f"results go to a branch, and {branch} is not one of yours. Write hf://me/out@v2." in done.stderr
    assert server.store.repos == {}
