"""What stops a job with the Hub: what cannot be meant, the account's storage, a token's rights, the network."""

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from command import RunCli, cli_environment, messages_of, run_cli, start_cli
from damaged_files import flip
from evaluation_makers import evaluation_of, write_evaluation
from faults import Fault
from loopback import TOKEN, LoopbackHub
from published import JOB, WORK

from scripts.fixture_maker.damage import edit_config, edit_json

SHARDS = [f"model-0000{i}-of-000005.safetensors" for i in range(1, 6)]
RUN = " ".join(JOB)
PUBLISH = "publish out --repo me/out --yes"


def ledger_with(**fields: object) -> Callable[[Path], object]:
    return lambda cwd: edit_json(cwd / "out" / "k2convert.json", lambda ledger: ledger.update(fields))


def stale_evaluation(cwd: Path) -> None:
    write_evaluation(cwd / "out", evaluation_of(cwd / "out"))
    edit_json(cwd / "out" / "evaluation.json", lambda document: document["rows"][0]["model"].update(weights="0" * 64))


def in_work(name: str, *, is_folder: bool) -> Callable[[Path], object]:
    """Put a file or a folder into the work folder of the job."""

    def arrange(cwd: Path) -> None:
        path = cwd / WORK / ".k2convert" / name
        path.parent.mkdir(parents=True)
        if is_folder:
            path.mkdir()
        else:
            path.write_text("x")

    return arrange


def nothing(_: Path) -> None:
    """The words alone are wrong."""


NO_BRANCH = ("refs/pr/1", "k2convert-0123", "0" * 40)
DAMAGED_LEDGERS: list[dict[str, object]] = [
    {"shards": None},
    {"shards": [1]},
    {"shards": {SHARDS[0]: {}}},
    {"shards": {"../x.safetensors": {"bytes": 1}}},
    {"fingerprint": None},
    {"source": {"repo": 5}},
]
REFUSED: list[tuple[Callable[[Path], object], str, int, str]] = [
    (lambda cwd: flip(cwd / "out" / SHARDS[2], -1), PUBLISH, 3, "does not validate, so it is not published"),
    (stale_evaluation, PUBLISH, 3, "does not validate, so it is not published"),
    *((ledger_with(**fields), PUBLISH, 1, f"k2convert.json: {next(iter(fields))}") for fields in DAMAGED_LEDGERS),
    (nothing, "publish out --repo me/out@refs/pr/1 --yes", 1, "results go to a branch, and refs/pr/1 is not one of"),
    (nothing, "publish out --repo me-/out --yes", 1, "not a repository"),
    (nothing, f"{PUBLISH} --base-model x", 1, "hf://x: not a repository"),
    (nothing, f"{PUBLISH} --base-model moon/tiny@v1", 1, "Leave out @v1"),
    (nothing, PUBLISH.removesuffix(" --yes"), 1, "needs --yes"),
    (nothing, RUN.removesuffix(" --yes"), 1, "needs --yes"),
    *((nothing, RUN.replace("me/out", f"me/out@{name}"), 1, f"and {name} is not one of yours") for name in NO_BRANCH),
    (nothing, f"{RUN} --max-disk 2MB", 1, "at once, but may use 2.00 MB. Allow more with --max-disk"),
    *((in_work(name, is_folder=False), RUN, 1, f"{name}: is not a folder") for name in ("source", "download", "done")),
    *(
        (in_work(f"download/{SHARDS[0]}{end}", is_folder=True), RUN, 1, "Is a directory")
        for end in ("", ".part", ".part.json")
    ),
    (lambda cwd: (cwd / WORK.parent).symlink_to("nowhere"), RUN, 1, f"{WORK}/.k2convert: cannot be"),
]


@pytest.mark.parametrize(("arrange", "words", "code", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_meant_is_refused_before_anything_is_published(
    arrange: Callable[[Path], object],
    words: str,
    code: int,
    message: str,
    tiny_hub: LoopbackHub,
    cli: RunCli,
    cwd: Path,
    local_result: Path,
) -> None:
    shutil.copytree(local_result, cwd / "out")
    arrange(cwd)
    done = cli(*words.split(), code=code)
    assert message in " ".join(messages_of(done.stderr).split())
    assert "Traceback" not in done.stderr
    assert all(list(repo.files()) == [".gitattributes"] for n, repo in tiny_hub.store.repos.items() if n != "moon/tiny")


@pytest.mark.parametrize("words", [RUN, PUBLISH])
def test_a_repository_with_other_weights_is_left_alone(
    tiny_hub: LoopbackHub, cli: RunCli, cwd: Path, tiny: Path, local_result: Path, words: str
) -> None:
    shutil.copytree(local_result, cwd / "out")
    before = tiny_hub.store.add_folder("me/out", tiny, private=True).refs.copy()
    done = cli(*words.split(), code=1)
    assert "me/out: main already holds other weights, and they are not replaced. " in done.stderr
    assert "Publish to hf://me/out@v2, or choose a new repository.\n" in done.stderr
    assert tiny_hub.store.repos["me/out"].refs == before


def test_names_are_kept(server: LoopbackHub, cli: RunCli, local_result: Path, tiny: Path, tmp_path: Path) -> None:
    server.store.add_folder("me/out", local_result)
    done = cli("inspect", "hf://me/out@main")
    assert done.stdout.startswith("hf://me/out@main: kimi-k2-thinking (")
    assert "cannot be converted" not in done.stdout
    source = Path(shutil.copytree(tiny, tmp_path / "source"))
    edit_config(source, model_type="deepseek_v3")
    server.store.add_folder("moon/other", source)
    refused = cli("run", "hf://moon/other", "out", code=1)
    assert messages_of(refused.stderr).startswith("error: hf://moon/other: config.json: model_type is 'deepseek_v3'")


def test_a_remote_source_is_planned_by_headers_alone(tiny_hub: LoopbackHub, cli: RunCli, cwd: Path, tiny: Path) -> None:
    assert json.loads(cli("inspect", "hf://moon/tiny", "--json").stdout)["int4_projections"] == 144
    cli(*JOB, "--dry-run", code=0)
    fits = [json.loads(cli("fit", at, "--gpu", "b200", "--json").stdout) for at in ("hf://moon/tiny", tiny)]
    assert fits[0] == fits[1] | {"checkpoint": "hf://moon/tiny"}
    fewer = cli("fit", "hf://moon/tiny", "--gpu", "b200", "--experts", "12", code=0).stderr
    assert "next: k2convert prune SOURCE PRUNED --keep FILE" in fewer, "prune reads folders"
    assert "`hf download` makes one of a repository" in fewer
    sent = tiny_hub.traffic.bytes_sent(r"\.safetensors$")
    assert sent < 0.3 * sum((tiny / name).stat().st_size for name in SHARDS)
    assert list(cwd.iterdir()) == []
    assert list(tiny_hub.store.repos) == ["moon/tiny"]


def test_a_source_with_another_hash_is_refused(tiny_hub: LoopbackHub, cli: RunCli, cwd: Path) -> None:
    cli("run", "hf://moon/tiny", "out", code=0)
    path = cwd / "out" / ".k2convert" / "job.json"
    job = json.loads(path.read_text())
    assert job["source"][SHARDS[1]] == tiny_hub.store.repos["moon/tiny"].files()[SHARDS[1]].sha256
    job["source"][SHARDS[1]] = "0" * 64
    path.write_text(json.dumps(job))
    done = cli("run", "hf://moon/tiny", "out", code=1)
    assert f"{SHARDS[1]}: this source shard has other bytes" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["run", "publish"])
def test_a_card_that_the_hub_would_refuse_is_settled_before_the_work(
    server: LoopbackHub, cli: RunCli, tiny: Path, cwd: Path, local_result: Path, verb: str
) -> None:
    source = Path(shutil.copytree(tiny, cwd / "source"))
    (source / "README.md").write_bytes(
        b"---\nlicense: modified-mit\npipeline_tag: chat\n---\n# caf\xe9, which is not UTF-8\n"
    )
    server.store.add_folder("moon/odd", source)
    words = {
        "run": ("hf://moon/odd", "hf://me/out"),
        "publish": (local_result, "--repo", "me/out", "--base-model", "moon/odd"),
    }
    cli(verb, *words[verb], "--yes", code=0)
    card = server.store.read("me/out", "README.md").decode()
    assert "--tool-call-parser kimi_k2" in card
    matter = yaml.safe_load(card.split("---")[1])
    assert "kimi-k2" in matter["tags"]
    assert (matter["license"], matter["license_name"]) == ("other", "modified-mit")
    assert matter["pipeline_tag"] == "text-generation"


def test_what_a_server_says_is_printed_without_tokens(tiny_hub: LoopbackHub, cli: RunCli) -> None:
    other = "hf_QzAbCdEfGhIjKlMnOpQrStUv"
    words = f"no access with Authorization: Bearer {TOKEN}; {other}; https://me:secret@proxy/?token=s3cret&x=1 hf_xet"
    tiny_hub.traffic.inject(
        Fault("GET", "/api/models/moon/tiny", status=503, words=words),
        Fault("GET", "/api/models/moon/tiny", status=403, words=words),
    )
    done = cli("inspect", "hf://moon/tiny", code=1)  # which fails if its output has the token
    errors = done.stderr.replace("\n", " ")
    assert "trying again" in errors
    assert errors.count("no access with Authorization: Bearer [token]") == 2
    assert errors.count("https://[token]@proxy/?token=[token]&x=1 hf_xet") == 2
    assert not any(secret in errors for secret in (other, "secret", "s3cret"))


@pytest.mark.quick(1)
@pytest.mark.parametrize("ends", ["well", "badly"])
@pytest.mark.parametrize("verbosity", ["warning", "debug"])
def test_no_address_of_an_upload_and_no_token_is_logged(
    tiny_hub: LoopbackHub, cwd: Path, verbosity: str, ends: str
) -> None:
    times = {"well": 2, "badly": 500}[ends]
    tiny_hub.traffic.inject(
        Fault("PUT", "/_lfs/", status=503, times=2), Fault("PUT", "/_lfs/", status=403, times=times - 2)
    )
    environment = {"HF_HUB_VERBOSITY": verbosity, "HF_HUB_DISABLE_XET": "1"}
    if verbosity == "debug":
        environment["HF_DEBUG"] = "1"
    with start_cli(*JOB, cwd=cwd, stderr=subprocess.PIPE, env=cli_environment() | environment) as process:
        _, errors = process.communicate(timeout=600)
    assert process.returncode == {"well": 0, "badly": 1}[ends], errors
    assert "thrown while requesting PUT http://[address]" in errors
    assert "/_lfs/" not in errors
    assert TOKEN not in errors


@pytest.mark.parametrize("inside", ["\x0b", "\u200b"])
def test_a_token_for_no_request_is_refused_unseen(tiny_hub: LoopbackHub, cli: RunCli, inside: str) -> None:
    done = cli(*JOB, HF_TOKEN=f"hf_Part{inside}Other", code=1)
    assert "has a character that tokens never have" in done.stderr
    assert "Part" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


STORAGE = [
    "Private repository storage limit reached, please upgrade your plan to increase your private storage limit.",
    "Your storage patterns tripped our internal systems! Please contact us so we can verify your account.",
]
CHANGE_PLAN = ("change the plan", "hoose another organization")
FORBIDDEN = [
    *(("POST", "/commit/", words, CHANGE_PLAN) for words in STORAGE),
    *(("GET", "xet-write-token", words, CHANGE_PLAN) for words in STORAGE),
    ("GET", "xet-write-token", "Forbidden", ("Use a token with write access to that namespace",)),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("method", "pattern", "answer", "remedies"), FORBIDDEN)
def test_what_the_hub_forbids_is_not_tried_again(
    tiny_hub: LoopbackHub, cli: RunCli, method: str, pattern: str, answer: str, remedies: tuple[str, ...]
) -> None:
    tiny_hub.traffic.inject(Fault(method, pattern, status=403, words=answer, times=99))
    begin = time.monotonic()
    done = cli(*JOB, code=1)
    assert time.monotonic() - begin < 25
    assert "trying again" not in done.stderr
    assert all(remedy in messages_of(done.stderr) for remedy in remedies)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:9", "ALL_PROXY: a SOCKS proxy needs the package socksio. Install it with: "),
        ("HTTPS_PROXY", "ftp://proxy", "HTTPS_PROXY: is not of a form that can be used"),
        ("no_proxy", "[::1]", "no_proxy: is not of a form that can be used"),
        ("NO_PROXY", "[::1]", "NO_PROXY: is not of a form that can be used"),
        ("SSL_CERT_FILE", "/nonexistent", "SSL_CERT_FILE: the certificates cannot be read (No such file or directory)"),
        ("SSL_CERT_FILE", __file__, "SSL_CERT_FILE: the certificates cannot be read"),
    ],
)
def test_a_wrong_variable_of_the_network_is_one_line(tmp_path: Path, variable: str, value: str, words: str) -> None:
    done = run_cli("inspect", "hf://moon/tiny", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0", **{variable: value})
    error = messages_of(done.stderr)
    assert (done.returncode, error.count("\n")) == (1, 1), done.stderr
    assert error.startswith(f"error: {words}")


def test_a_retry_is_said_once_a_minute_and_every_other_line_always(capsys: pytest.CaptureFixture[str]) -> None:
    from k2convert.cli.console import notifier

    notify = notifier()
    for pause in range(8):
        notify(f"no byte for 60 s; trying again in {pause} s")
    notify("the Hub answered 503; trying again in 1 s")
    for layer in (1, 2):
        notify(f"warning: layer {layer}: the squared error is 0.0{layer}; by rule mse it would be 0.00")
        notify(f"model-{layer}.safetensors arrived with a wrong sha256; fetching it again")
    shown = capsys.readouterr().err
    assert shown.count("trying again") == 1
    assert shown.count("warning: layer") == shown.count("fetching it again") == 2, "no other line is one that repeats"


ANSWERS = {
    "a login page": ("text/html", b"<html><title>Log in to the airport</title></html>"),
    "an empty object": ("application/json", b"{}"),
    "a list": ("application/json", b"[]"),
    "a number": ("application/json", b"5"),
    "text": ("application/json", b'"log in first"'),
    "null": ("application/json", b"null"),
    "names of a wrong kind": (
        "application/json",
        b'{"name": 7, "orgs": 7, "auth": [], "id": [1], "sha": 5, "siblings": 7, "private": "x", "lastModified": 1}',
    ),
    "a list of something": (
        "application/json",
        b'[1, {"path": 3}, {"type": "file", "path": 3, "size": "x", "oid": 1}]',
    ),
    "half of a surrogate pair": ("application/json", b'{"name": "\\ud800", "sha": "\\ud800", "id": "\\ud800"}'),
    "nothing": ("application/json", b""),
}
COMMANDS = {
    "inspect": ["inspect", "hf://moon/tiny"],
    "run from the Hub": ["run", "hf://moon/tiny", "out", "--dry-run"],
    "run to the Hub": ["run", "TINY", "hf://me/out", "--yes"],
    "publish": ["publish", "RESULT", "--repo", "me/out", "--yes"],
}


@contextmanager
def portal(kind: str, body: bytes) -> Iterator[str]:
    """A server that gives every request the same answer; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_POST = do_HEAD = do_PUT = do_DELETE = answer  # noqa: N815 - names the base class calls

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.usefixtures("hub")
@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("name", "answer"),
    [
        (name, answer)
        for name in COMMANDS
        for answer in ANSWERS
        if name.endswith(("inspect", "to the Hub")) or "of" in answer
    ],
)
def test_an_answer_that_is_not_the_hubs_is_one_line(
    name: str, answer: str, tiny: Path, local_result: Path, cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    with portal(*ANSWERS[answer]) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        words = [{"TINY": str(tiny), "RESULT": str(local_result)}.get(word, word) for word in COMMANDS[name]]
        done = cli(*words)
    assert done.returncode == 1, done.stderr
    errors = [line for line in messages_of(done.stderr).splitlines() if "trying again" not in line]
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith("error: ")
    assert len(errors[0]) < 600
