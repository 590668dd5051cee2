"""Repository names, and one connection to the Hub: requests with retries and backoff.

The token comes from HF_TOKEN or the login file, through the library alone; nothing here reads, prints or stores it.
"""

import os
import random
import re
import socket
import ssl
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from k2convert import __version__
from k2convert.errors import HubError
from k2convert.hub.request_errors import HubRequestError, explained, offline_error

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")

SCHEME = "hf://"
STALL_SECONDS = 60.0  # without a byte for this long a connection counts as broken: the library's client has no limit
NUM_ATTEMPTS = 6
FIRST_RETRY_SECONDS = 1.0  # after the first failure; it doubles with each, up to MAX_RETRY_SECONDS, with jitter
MAX_RETRY_SECONDS = 60.0
_REPO = re.compile(r"[A-Za-z0-9](?:[\w.-]*\w)?/[A-Za-z0-9](?:[\w.-]*\w)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class RepoRef:
    """A repository as the user named it; `revision` is a branch, tag or commit, or None for main."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{SCHEME}{self.repo}" + (f"@{self.revision}" if self.revision else "")


def parse_repo(text: str) -> RepoRef | None:
    """Read `hf://owner/name[@revision]`, or `owner/name[@revision]` where no such path exists; None means a path.

    Raises HubError for an hf:// address that names no repository. No network is touched.
    """
    name, _, revision = text.removeprefix(SCHEME).partition("@")
    fits = _REPO.fullmatch(name) is not None and len(name) <= 96 and not re.search(r"--|\.\.|\.git$", name)
    if text.startswith(SCHEME):
        if not fits or ("@" in text and not revision):
            raise HubError(f"{text}: not a repository. Write hf://owner/name or hf://owner/name@revision.")
        return RepoRef(name, revision or None)
    if not fits or ("@" in text and not revision) or Path(text).exists():
        return None
    return RepoRef(name, revision or None)


def ignore(_: object) -> None:
    """Report nowhere: the default of every progress and notice callable here."""


@dataclass(frozen=True, slots=True)
class Hub:
    """One connection to the Hub; `notify` is told about each retry."""

    notify: Callable[[str], None] = ignore

    @property
    def endpoint(self) -> str:
        """HF_ENDPOINT as it is now, else the library's own address; raises HubError where it is no address."""
        check_endpoint()
        from huggingface_hub import constants

        return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")

    def api(self) -> "HfApi":
        """The library's client; raises HubError at once when the network is switched off."""
        check_online()
        endpoint = self.endpoint
        check_token()
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        return HfApi(endpoint=endpoint, library_name="k2convert", library_version=__version__)

    def call(self, action: str, function: Callable[[], T]) -> T:
        """Run one request, again after passing troubles; raises HubError that begins with `action`."""
        for attempt in range(NUM_ATTEMPTS):
            try:
                with explained(action):
                    return function()
            except HubRequestError as error:
                if not error.transient or attempt + 1 == NUM_ATTEMPTS:
                    raise
                pause = self.pause(error, attempt=attempt)
                self.notify(f"{error.reason}; trying again in {pause:.0f} s")
                time.sleep(pause)
        raise AssertionError("a retry policy needs at least one attempt")

    def pause(self, error: HubRequestError, *, attempt: int) -> float:
        """Seconds to wait after `error`: as long as the Hub asked for, else twice as long with each attempt."""
        if error.retry_after is not None:
            return error.retry_after + 0.1
        return min(MAX_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2**attempt) * random.uniform(0.75, 1.25)

    def headers(self) -> dict[str, str]:
        """Request headers with the user's token, if any; never to be logged."""
        check_token()
        from huggingface_hub import utils

        return utils.build_hf_headers(  # pyright: ignore[reportUnknownMemberType]
            library_name="k2convert", library_version=__version__
        )

    def accepts_card(self, text: str) -> bool:
        """Whether the Hub would take this text as a model's README.md; raises HubError where it does not say."""

        def ask() -> bool:
            from huggingface_hub.utils import get_session, hf_raise_for_status

            body = {"repoType": "model", "content": text}
            response = get_session().post(f"{self.endpoint}/api/validate-yaml", json=body, headers=self.headers())
            if response.status_code == 400:
                return False
            hf_raise_for_status(response)
            return True

        return self.call("check the model card", ask)

    @contextmanager
    def stream_range(self, url: str, *, begin: int, end: int, direct: bool = True) -> Generator["RangeBody"]:
        """Open bytes [begin, end) of `url` to be read; one attempt, HubRequestError when it fails.

        A response that is shorter, longer or of another range than asked for is an error, not data. Unless `direct`,
        every byte comes through the HTTP library, and the connection can serve another request afterwards.
        """
        check_online()
        from huggingface_hub.utils import get_session, hf_raise_for_status

        headers = self.headers() | {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        with (
            explained(f"fetch bytes {begin}-{end - 1} of {url}"),
            get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=STALL_SECONDS) as response,
        ):
            if response.status_code >= 400:
                response.read()
            hf_raise_for_status(response)
            answered = response.headers.get("Content-Range", "")
            if response.status_code != 206 or not answered.startswith(f"bytes {begin}-{end - 1}/"):
                raise HubRequestError(
                    f"{url}: asked for bytes {begin}-{end - 1}, the answer was {response.status_code} {answered!r}. "
                    "A proxy between here and the Hub may strip ranges."
                )
            connection = body_socket(response, end - begin) if direct else None
            yield RangeBody(response.iter_raw(), end - begin, connection=connection, where=url)

    def fetch_range(self, url: str, *, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of `url`, retried."""
        data = bytearray(end - begin)

        def fetch() -> bytes:
            filled = 0
            with self.stream_range(url, begin=begin, end=end, direct=False) as body:
                while count := body.read_into(memoryview(data)[filled:]):
                    filled += count
            return bytes(data)

        return self.call(f"fetch bytes {begin}-{end - 1} of {url}", fetch) if end > begin else b""


def check_endpoint() -> None:
    """Raise HubError when HF_ENDPOINT is no address: the library's import fails for some that are none."""
    address = os.environ.get("HF_ENDPOINT")
    if address and not _is_address(address):
        raise HubError(f"HF_ENDPOINT is {address!r}: not an address. Write for example https://huggingface.co.")


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


class RangeBody:
    """The bytes of one range response, read into the caller's memory.

    A library made for small answers copies each 64 KB, under TLS each 16 KB, four times and holds the interpreter
    meanwhile. So, where `connection` is given, what follows the library's first piece is read from its socket.
    """

    def __init__(
        self, pieces: Iterator[bytes], num_bytes: int, *, connection: socket.socket | None, where: str
    ) -> None:
        self._pieces, self._num_bytes, self._where = pieces, num_bytes, where
        self._connection = connection
        self._received = 0
        self._piece: memoryview | None = None

    def read_into(self, memory: memoryview) -> int:
        """Fill the beginning of `memory` with what has come, at least a byte; returns how many, 0 at the end.

        Raises HubRequestError where the response ends before its range does, or does not end with it.
        """
        if self._piece is None or (not self._piece and self._connection is None):
            self._piece = memoryview(next(self._pieces, b""))
            self._received += len(self._piece)
            if self._received > self._num_bytes:
                raise self._unlike("more")
        if self._piece:
            count = min(len(self._piece), len(memory))
            memory[:count] = self._piece[:count]
            self._piece = self._piece[count:]
            return count
        if self._connection is not None and self._received < self._num_bytes:
            count = self._receive(self._connection, memory[: self._num_bytes - self._received])
            self._received += count
            if count:
                return count
        if self._received < self._num_bytes:
            raise self._unlike(f"only {self._received:,}")
        return 0

    def _receive(self, connection: socket.socket, memory: memoryview) -> int:
        try:
            return connection.recv_into(memory)
        except OSError as error:  # a line that is down has more errors than Python has names for
            reason = f"the connection to the Hub failed ({type(error).__name__}: {error})"
            raise HubRequestError(
                f"{self._where}: {reason}. Check the network; running the same command again continues the work.",
                reason=reason,
                transient=True,
            ) from error

    def _unlike(self, amount: str) -> HubRequestError:
        reason = f"the answer had {amount} of {self._num_bytes:,} bytes"
        return HubRequestError(f"{self._where}: {reason}. Run the same command again.", reason=reason, transient=True)


def body_socket(response: Any, num_bytes: int) -> socket.socket | None:
    """The socket that the rest of a response's body can be read from as it is, where there is one.

    None for other protocols than HTTP/1.1, for a body that is coded in any way or not of `num_bytes`, and for TLS
    within TLS.
    """
    headers, stream = response.headers, response.extensions.get("network_stream")
    coded = "Transfer-Encoding" in headers or "Content-Encoding" in headers
    if (
        stream is None
        or coded
        or response.http_version != "HTTP/1.1"
        or headers.get("Content-Length") != str(num_bytes)
    ):
        return None
    connection: object = stream.get_extra_info("socket")
    kind = socket.socket if stream.get_extra_info("ssl_object") is None else ssl.SSLSocket
    if not isinstance(connection, kind):
        return None
    connection.settimeout(STALL_SECONDS)
    return connection


def check_online() -> None:
    """Raise HubError when HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) forbids the network."""
    if any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in _OFFLINE):
        raise offline_error()


def check_token() -> None:
    """Raise HubError for a token that no request can carry; the error of the request would show it."""
    from huggingface_hub import get_token

    if not all("!" <= character <= "~" for character in get_token() or ""):
        raise HubError(
            "the token in HF_TOKEN (or the login file) has a character that no token has, such as a space, a control "
            "character or a curly quote. Copy it again."
        )


_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
