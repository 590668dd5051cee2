"""Repository names, and one connection to the Hub: requests with retries and backoff.

The library reads the token from HF_TOKEN or the login file. This package never prints or stores it.
"""

import ctypes
import logging
import os
import random
import re
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic as now
from time import sleep
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

from k2convert import __version__
from k2convert.errors import HubError, SourceReadError, quoted
from k2convert.hub.request_errors import (
    WITHOUT_ADDRESSES,
    HubRequestError,
    environment_error,
    explained,
    of_known_form,
    offline_error,
)

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")

SCHEME = "hf://"
FILE_SCHEME: Final = "file://"
MAIN = "main"
STALL_SECONDS = 60.0  # a connection without a byte for this long is broken; the library's client sets no limit
ANSWER_SECONDS = 300.0  # the same while the Hub works on an answer, such as that to a commit
NUM_ATTEMPTS = 6
FIRST_RETRY_SECONDS = 1.0  # after the first failure; it doubles with each, up to MAX_RETRY_SECONDS, with jitter
MAX_RETRY_SECONDS = 60.0
PATIENCE_SECONDS = 3600.0  # how long an outage may last: answers of 5xx, refused and broken connections
MAX_STREAMS = 4  # of hf_xet
NUM_HEAPS = 4
_LIBRARY: Final = "huggingface_hub"
_BARS: Final = "huggingface_hub.utils.tqdm"
_PIECE_BYTES: Final = 1 << 20
_M_ARENA_MAX = -8  # glibc's malloc.h
_REPO = re.compile(r"[A-Za-z0-9](?:[\w.-]*\w)?/[A-Za-z0-9](?:[\w.-]*\w)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class RepoRef:
    """A repository; `revision` is a branch, a tag or a commit, None for main."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{SCHEME}{self.repo}" + (f"@{self.revision}" if self.revision else "")


def target_revision(ref: RepoRef) -> str:
    """Return the branch that a result goes to: main, or the one in the address; raises HubError if it is no branch."""
    name = ref.revision or MAIN
    if re.fullmatch(r"[0-9a-f]{40}|refs/.*|k2convert-.*", name):
        raise HubError(f"{ref}: results go to a branch, and {name} is not one of yours. Write {SCHEME}{ref.repo}@v2.")
    return name


def parse_repo(text: str) -> RepoRef | None:
    """Read `[hf://]owner/name[@revision]`, None for a path; raises HubError for a wrong hf:// address."""
    name, _, revision = text.removeprefix(SCHEME).partition("@")
    fits = _REPO.fullmatch(name) is not None and len(name) <= 96 and not re.search(r"--|\.\.|\.git$", name)
    if text.startswith(SCHEME):
        if not fits or ("@" in text and not revision):
            raise HubError(f"{text}: not a repository. Write hf://owner/name or hf://owner/name@revision.")
        return RepoRef(name, revision or None)
    if not fits or ("@" in text and not revision) or Path(text).exists():
        return None
    return RepoRef(name, revision or None)


def bound_memory() -> None:
    """Cap the streams and heaps of hf_xet. Call it before any thread starts. Variables that the user set stay.

    hf_xet assembles objects of 64 MB, holds one per stream, and uses up to 64 streams on a fast line. It also has about
    a hundred threads, and each thread's malloc heap keeps part of what it frees. A Hub-to-Hub job of 5 GB took 1.0 GB
    before these bounds and smaller buffers, and 0.57 GB with both (`python -m scripts.bench.hub`). One upload of 1 GB
    to a local store has few streams: it uses 0.34 GB with or without the bounds.
    """
    os.environ.setdefault("HF_XET_CLIENT_AC_MAX_UPLOAD_CONCURRENCY", str(MAX_STREAMS))
    if "MALLOC_ARENA_MAX" not in os.environ:
        with suppress(OSError, AttributeError):  # the C library is not glibc
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, NUM_HEAPS)


def ignore(*_: object, **_options: object) -> None:
    """Discard a notice or a count."""


@dataclass(slots=True)
class Failures:
    """The failures of one request since it last made progress. They decide whether and when to repeat it."""

    outages_pass: bool
    count: int = 0
    since: float = 0.0

    def pause_after(self, error: HubRequestError) -> float:
        """Return the seconds to wait before the next attempt; raises the error if there is none.

        With `outages_pass`, an outage may last PATIENCE_SECONDS. Anything else that may pass is tried NUM_ATTEMPTS
        times. The pause is what the Hub asked for, or else twice as long after each attempt.
        """
        if self.count == 0:
            self.since = now()
        self.count += 1
        is_over = self.count >= NUM_ATTEMPTS
        if error.is_outage and self.outages_pass:
            is_over = now() - self.since >= PATIENCE_SECONDS
        if not error.transient or is_over:
            raise error
        if error.retry_after is not None:
            return error.retry_after + 0.1
        return min(MAX_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** min(self.count - 1, 10)) * random.uniform(0.75, 1.25)


@dataclass(frozen=True, slots=True)
class Hub:
    """One connection to the Hub; `notify` receives a line of text about each retry, `warn` what changes a result.

    A job waits until an outage is over (`outages_pass`). A command that only asks something does not.
    """

    notify: Callable[[str], None] = ignore
    warn: Callable[[str], None] = ignore
    outages_pass: bool = True

    @property
    def endpoint(self) -> str:
        """HF_ENDPOINT as it is now, or the library's default address; raises HubError if it is not an address."""
        check_endpoint()
        from huggingface_hub import constants

        return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")

    def api(self) -> "HfApi":
        """The library's client; raises HubError if the user switched the network off."""
        check_online()
        endpoint = self.endpoint
        check_environment()
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        for handler in logging.getLogger("huggingface_hub").handlers:
            handler.addFilter(WITHOUT_ADDRESSES)  # once: a handler has a filter or not
        return HfApi(endpoint=endpoint, library_name="k2convert", library_version=__version__)

    def call(self, action: str, function: Callable[[], T]) -> T:
        """Run one request, and retry it after transient errors; raises a HubError that names `action`."""
        failures = Failures(self.outages_pass)
        while True:
            try:
                with explained(action), of_known_form(action):
                    bound_requests()
                    return function()
            except HubRequestError as error:
                pause = failures.pause_after(error)
                self.notify(f"{error.reason}; trying again in {pause:.0f} s")
                sleep(pause)

    def headers(self) -> dict[str, str]:
        """Request headers with the user's token, if there is one; never log them."""
        check_environment()
        from huggingface_hub import utils

        return utils.build_hf_headers(  # pyright: ignore[reportUnknownMemberType]
            library_name="k2convert", library_version=__version__
        )

    def accepts_card(self, text: str) -> bool:
        """Return whether the Hub accepts this text as a model's README.md; raises HubError if it does not answer."""

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
    def stream_range(self, url: str, *, begin: int, end: int) -> Generator[Iterator[bytes]]:
        """Open bytes [begin, end) of `url` as pieces, in one attempt; raises HubRequestError for any other range.

        `file://` is a file in the local cache.
        """
        if url.startswith(FILE_SCHEME):
            yield exact_pieces(_file_pieces(url, begin, end), end - begin, where=url)
            return
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
                    f"{url}: asked for bytes {begin}-{end - 1}, but the answer was {response.status_code} "
                    f"{quoted(answered)}. A proxy may remove the Range header: connect without it."
                )
            yield exact_pieces(response.iter_raw(), end - begin, where=url)

    def fetch_range(self, url: str, *, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of `url`, retried."""

        def fetch() -> bytes:
            with self.stream_range(url, begin=begin, end=end) as pieces:
                return b"".join(pieces)

        if end > begin:
            return self.call(f"fetch bytes {begin}-{end - 1} of {url}", fetch)
        return b""


def bound_requests() -> None:
    """Let the library's HTTP client give up a connection that nothing comes from: its own requests wait forever."""
    from huggingface_hub.utils import get_session

    hooks = get_session().event_hooks["request"]
    if _bound_request not in hooks:
        hooks.append(_bound_request)


def _bound_request(request: Any) -> None:
    """Set the limits that a request of httpx does not have."""
    limits = {"connect": STALL_SECONDS, "read": ANSWER_SECONDS, "write": STALL_SECONDS}
    given = request.extensions.get("timeout", {})
    request.extensions["timeout"] = given | {key: limit for key, limit in limits.items() if given.get(key) is None}


def unbound_requests() -> None:
    """Put back what `bound_requests` changes."""
    if _LIBRARY in sys.modules:
        from huggingface_hub.utils import get_session

        hooks = get_session().event_hooks["request"]
        if _bound_request in hooks:
            hooks.remove(_bound_request)


def progress_bars() -> dict[str, bool]:
    """Return the library's settings of its progress bars, which `Hub.api` turns off; none if it is not loaded."""
    library = sys.modules.get(_BARS)
    if library is None:
        return {}
    return dict(library.progress_bar_states)


def restore_progress_bars(states: Mapping[str, bool]) -> None:
    """Put back what `progress_bars` returned."""
    if (library := sys.modules.get(_BARS)) is not None:
        library.progress_bar_states.clear()
        library.progress_bar_states.update(states)


def check_endpoint() -> None:
    """Raise HubError if HF_ENDPOINT is not an address: importing the library fails for some malformed ones."""
    address = os.environ.get("HF_ENDPOINT")
    if address and not _is_address(address):
        raise HubError(f"HF_ENDPOINT is {quoted(address)}: not an address. Write, for example, https://huggingface.co.")


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def _file_pieces(url: str, begin: int, end: int) -> Iterator[bytes]:
    path = Path(url.removeprefix(FILE_SCHEME))
    try:
        with path.open("rb") as file:
            file.seek(begin)
            while begin < end and (piece := file.read(min(end - begin, _PIECE_BYTES))):
                begin += len(piece)
                yield piece
    except OSError as error:
        raise SourceReadError(f"{path}: cannot be read ({error.strerror}). Check permissions and disk.") from None


def exact_pieces(pieces: Iterator[bytes], num_bytes: int, *, where: str) -> Iterator[bytes]:
    """Yield the pieces of a body; raises HubRequestError unless they are `num_bytes` in all."""
    received = 0
    for piece in pieces:
        received += len(piece)
        if received > num_bytes:
            break
        yield piece
    if received != num_bytes:
        amount = "more" if received > num_bytes else f"only {received:,}"
        reason = f"the answer had {amount} of {num_bytes:,} bytes"
        remedy = "Check the network, then run the same command again to continue."
        raise HubRequestError(f"{where}: {reason}. {remedy}", reason=reason, transient=True, is_outage=True)


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set."""
    variables = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in variables)


def check_online() -> None:
    """Raise HubError if the user switched the network off."""
    if is_offline():
        raise offline_error()


def check_environment() -> None:
    """Raise HubError if a request header cannot carry the token, or the variables for proxies allow no HTTP client."""
    from huggingface_hub import get_token
    from huggingface_hub.utils import get_session

    if not all("!" <= character <= "~" for character in get_token() or ""):  # the request's own error would print it
        raise HubError(
            "the token in HF_TOKEN (or the login file) has a character that tokens never have, such as a space, a "
            "control character or a curly quote. Copy it again."
        )
    try:
        get_session()
    except Exception as error:  # each library below the client has its own
        raise environment_error(error) from None
