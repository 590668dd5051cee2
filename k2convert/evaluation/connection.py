"""Requests to one server: bounded in size and time, tried again after transient errors.

A connection is direct: no proxy, and no redirect is followed, because the key would go to a host that nobody named. The
key comes from the environment only. No message repeats it, even if a server does.
"""

import http.client
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Final
from urllib.parse import urlsplit

from k2convert.errors import EndpointError, cut, quoted, shortened
from k2convert.hub.client import FIRST_RETRY_SECONDS, NUM_ATTEMPTS
from k2convert.hub.request_errors import TRANSIENT_STATUS, retry_after

KEY_NAME: Final = "K2CONVERT_API_KEY"
"""The variable with the key of both servers. OPENAI_API_KEY is not sent: it belongs to a different server."""
OTHER_KEY_NAME: Final = "K2CONVERT_API_KEY_B"
"""The variable with the key of the second server, if it has its own."""

CONNECT_SECONDS: Final = 10.0
ANSWER_SECONDS: Final = 600.0
MAX_PAUSE_SECONDS: Final = 60.0
_SLOW_ATTEMPTS: Final = 2  # each takes ANSWER_SECONDS
_MAX_ERROR_BYTES: Final = 1 << 20
_MIN_KEY: Final = 4  # what is shorter could be part of any word
_AGAIN: Final = "then run the same command again: answers are kept."


def redacted(text: str) -> str:
    """Return a text without the keys."""
    for name in (KEY_NAME, OTHER_KEY_NAME):
        if len(key := os.environ.get(name, "").strip()) >= _MIN_KEY:
            text = text.replace(key, "[key]")
    return text


def read_key(*names: str) -> str | None:
    """Return the value of the first variable that is set; raises EndpointError if a header cannot carry it."""
    name = next((name for name in names if os.environ.get(name, "").strip()), None)
    if name is None:
        return None
    key = os.environ[name].strip()
    if not all("!" <= character <= "~" for character in key):  # the library's own error would print it
        raise EndpointError(f"{name}: has a character that no key has, such as a space. Copy it again.")
    return key


def is_address(text: str) -> bool:
    """Return whether a text is meant as a server's address."""
    return re.match(r"https?:", text, flags=re.IGNORECASE) is not None


def parse_address(text: str) -> str:
    """Return http(s)://HOST[:PORT][/PATH] without /v1 at its end; raises EndpointError, which repeats no password."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        parts = urlsplit("")
        port = None
    if "@" in text:
        raise EndpointError(
            f"an address has a user or a password in it, which histories and logs keep. Set {KEY_NAME} instead."
        )
    host = parts.hostname
    if not host or parts.query or parts.fragment or not text.isascii() or not re.fullmatch(r"\S+", text):
        raise EndpointError(f"{quoted(text)}: not the address of a server. Write http://HOST:PORT/v1.")
    if ":" in host:
        host = f"[{host}]"
    if port is not None:
        host = f"{host}:{port}"
    path = re.sub(r"(/v1)?/*$", "", parts.path)
    return f"{parts.scheme}://{host}{path}"


class RequestError(EndpointError):
    """A failed request. `status` is that of an answer, `words` what the server said."""

    def __init__(
        self, message: str, *, attempts: int = 1, pause: float | None = None, status: int | None = None, words: str = ""
    ) -> None:
        super().__init__(redacted(message))
        self.attempts, self.pause, self.status, self.words = attempts, pause, status, redacted(words)


class Connection:
    """Requests to one server, from any thread. `notify` receives a line about each retry.

    `address` is as `parse_address` returns it, and `shown` as messages have it: it may be of any length.
    """

    def __init__(self, address: str, *, key: str | None, notify: Callable[[str], None]) -> None:
        self.address = address
        self.shown = shortened(address)
        self._key = key
        self._notify = notify
        self._tls = ssl.create_default_context() if address.startswith("https:") else None
        self._sockets = set[socket.socket]()
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End every request: those under way fail, and others are not begun."""
        self._stopped.set()
        for opened in tuple(self._sockets):
            _shut(opened)

    def request(self, path: str, body: bytes | None = None, *, limit: int, attempts: int = NUM_ATTEMPTS) -> bytes:
        """Return the body of an answer with status 200, of at most `limit` bytes; raises RequestError.

        Without a body to send, the request is a GET.
        """
        for attempt in range(1, attempts + 1):
            try:
                return self._once(path, body, limit)
            except RequestError as error:
                if attempt >= min(attempts, error.attempts) or self._stopped.is_set():
                    raise
                pause = min(error.pause or FIRST_RETRY_SECONDS * 2 ** (attempt - 1), MAX_PAUSE_SECONDS)
                self._notify(f"{str(error).partition('. ')[0]}; trying again in {pause:.0f} s")
                self._stopped.wait(pause)
        raise AssertionError("a retry policy needs at least one attempt")

    def _once(self, path: str, body: bytes | None, limit: int) -> bytes:
        parts = urlsplit(self.address)
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self._tls is None:
            connection = http.client.HTTPConnection(parts.netloc, timeout=CONNECT_SECONDS)
        else:
            connection = http.client.HTTPSConnection(parts.netloc, timeout=CONNECT_SECONDS, context=self._tls)
        expired = threading.Event()
        try:
            connection.connect()
            with self._watched(connection.sock, expired):
                connection.request("GET" if body is None else "POST", parts.path + path, body, headers)
                response = connection.getresponse()
                announced = response.length
                data = response.read(limit + 1 if response.status == 200 else _MAX_ERROR_BYTES)
                if response.status != 200:
                    raise self._refused(response, data, path)
                if len(data) > limit:
                    raise RequestError(
                        f"{self.shown}: answers with more than {limit:,} bytes, more than was asked for. Check the "
                        "address."
                    )
                if announced is not None and len(data) < announced:
                    raise ConnectionError(f"{len(data):,} of {announced:,} bytes came")
            if expired.is_set():
                raise TimeoutError  # what came ends where it was cut off
            return data
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            if isinstance(error, EndpointError) and not expired.is_set():
                raise
            raise self._failed(error, expired=expired.is_set()) from None
        finally:
            connection.close()

    @contextmanager
    def _watched(self, opened: socket.socket, expired: threading.Event) -> Generator[None]:
        """Bound the time of a request: of its answer as a whole, which may come in drips."""
        opened.settimeout(None)
        watch = threading.Timer(ANSWER_SECONDS, lambda: (expired.set(), _shut(opened)))
        watch.daemon = True
        watch.start()
        self._sockets.add(opened)
        try:
            if self._stopped.is_set():
                raise ConnectionError("the command ends")
            yield
        finally:
            watch.cancel()
            self._sockets.discard(opened)

    def _refused(self, response: http.client.HTTPResponse, data: bytes, path: str) -> RequestError:
        status = response.status
        headers = response.headers
        words = cut(redacted(data.decode(errors="replace")))
        said = f"{self.shown}: answers {status}" + (f" ({words})" if words else "")
        if 300 <= status < 400:
            place = urlsplit(headers.get("Location", ""))
            where = ""
            if place.netloc:
                where = " to " + shortened(f"{place.scheme}://{place.netloc.rpartition('@')[2]}")
            advice = f"{self.shown}: leads elsewhere{where}, which is not followed. Pass the address of the server."
            return RequestError(advice, status=status)
        if status in (401, 403):
            return RequestError(f"{said}. Set {KEY_NAME} to the server's key.", status=status)
        if status in (404, 405):
            return RequestError(f"{self.shown}: has no {path}. Pass the address of vLLM or SGLang.", status=status)
        if status in TRANSIENT_STATUS:
            pause = retry_after({"Retry-After": headers.get("Retry-After", "")})
            advice = f"{said}. Check the server, {_AGAIN}"
            return RequestError(advice, attempts=NUM_ATTEMPTS, pause=pause, status=status, words=words)
        return RequestError(f"{said}. Its answer says why.", status=status, words=words)

    def _failed(self, error: Exception, *, expired: bool) -> RequestError:
        if expired:
            why = f"did not answer within {ANSWER_SECONDS:.0f} seconds. Pass a smaller --window or fewer --requests"
            return RequestError(f"{self.shown}: {why}, {_AGAIN}", attempts=_SLOW_ATTEMPTS)
        if isinstance(error, ssl.SSLCertVerificationError):
            why = f"its certificate is not trusted ({error.verify_message}). Set SSL_CERT_FILE to its authority's"
            return RequestError(f"{self.shown}: {why}.")
        if isinstance(error, socket.gaierror | UnicodeError):
            return RequestError(f"{self.shown}: there is no such host. Check the address.")
        what = cut(redacted(str(error))) or type(error).__name__
        said = f"{self.shown}: the connection failed ({what})"
        return RequestError(f"{said}. Check the server, {_AGAIN}", attempts=NUM_ATTEMPTS)


def _shut(opened: socket.socket) -> None:
    with suppress(OSError):
        socket.socket.shutdown(opened, socket.SHUT_RDWR)  # of TLS too: whoever reads gets the end
