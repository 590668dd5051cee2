"""What stops a job with the Hub from outside: the account's storage, a token's rights, proxies, certificates."""

import time
from pathlib import Path

import pytest
from command import RunCli, run_cli, said
from faults import Fault
from loopback import LoopbackHub
from published import JOB

STORAGE = [
    "Private repository storage limit reached, please upgrade your plan to increase your private storage limit.",
    "Your storage patterns tripped our internal systems! Please contact us so we can verify your account.",
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("words", STORAGE)
@pytest.mark.parametrize(("method", "pattern"), [("POST", "/commit/"), ("GET", "xet-write-token")])
def test_an_account_without_room_is_told_so_at_once(
    tiny_hub: LoopbackHub, cli: RunCli, method: str, pattern: str, words: str
) -> None:
    tiny_hub.traffic.inject(Fault(method, pattern, status=403, words=words, times=99))
    begin = time.monotonic()
    done = cli(*JOB, code=1)
    assert time.monotonic() - begin < 25
    assert "trying again" not in done.stderr
    assert "change the plan" in said(done.stderr)
    assert "hoose another organization" in said(done.stderr)


def test_a_token_that_may_not_write_by_xet_is_not_tried_again(tiny_hub: LoopbackHub, cli: RunCli) -> None:
    tiny_hub.traffic.inject(Fault("GET", "xet-write-token", status=403, words="Forbidden", times=99))
    done = cli(*JOB, code=1)
    assert "trying again" not in done.stderr
    assert "Use a token with write access to that namespace" in said(done.stderr)


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
def test_a_variable_of_the_network_that_cannot_be_used_is_named_in_one_line(
    tmp_path: Path, variable: str, value: str, words: str
) -> None:
    done = run_cli("inspect", "hf://moon/tiny", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0", **{variable: value})
    error = said(done.stderr)
    assert (done.returncode, error.count("\n")) == (1, 1), done.stderr
    assert error.startswith(f"error: {words}")


def test_several_connections_that_fail_alike_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from k2convert.cli.console import notifier

    notify = notifier()
    for pause in range(8):
        notify(f"no byte for 60 s; trying again in {pause} s")
    notify("the Hub answered 503; trying again in 1 s")
    assert capsys.readouterr().err.count("trying again") == 2
