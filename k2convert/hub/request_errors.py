"""Meaning of a failed request: what the user should do, and whether a retry may help.

What a server or the library says is printed without tokens: a proxy or a login page may repeat the request's headers.
"""

import errno
import json
import logging
import os
import re
import ssl
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Final

from k2convert.errors import HubError, K2ConvertError, cut, install_remedy

TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524})
MAX_PAUSE_SECONDS = 3600.0

_ADVICE = {
    400: "The Hub did not accept the request. Its answer says why; correct that first.",
    401: "Set HF_TOKEN to a valid token, or log in with `hf auth login`.",
    402: "The account's storage or plan does not allow this. Free space, change the plan, or use --public.",
    403: "The token may not do this. Use one with write access to that namespace. For a gated source, accept the terms "
    "on the model's page.",
    404: "Check the spelling. A private or gated repository needs a token that may read it: set HF_TOKEN or use "
    "`hf auth login`.",
    409: "Something else changed the repository at the same time. Run the same command again.",
    412: "The branch moved while this ran. Look at what was committed there, then run the same command again.",
    413: "The file is larger than the Hub accepts. Split it first.",
    416: "The file on the Hub is shorter than its listing says. Run the same command again.",
    429: "The Hub limits the requests of this account. Wait as long as it says, then run the same command again.",
}


_NO_ROOM = re.compile(r"storage|quota|upgrade your|payment", re.IGNORECASE)  # words of a 403
_ROOM = (
    "Free space on the Hub, change the plan, use --public if the result may be public, or choose another organization."
)
_NO_ROOM_ADVICE = f"The account has no room for this. {_ROOM}"
_NO_TOKEN_ADVICE = (  # hf_xet keeps the Hub's words to itself
    "The token may not write there, or the account has no room. Use a token with write access to that namespace. If it "
    f"has that: {_ROOM[0].lower()}{_ROOM[1:]}"
)
_REFUSED = re.compile(
    r"\b(401|402|403)\b.*?(?:Forbidden|Unauthorized|Payment Required)|client error \((4\d\d)\b",
    re.IGNORECASE | re.DOTALL,
)
_BY_PROXY = re.compile(r"\s*4\d\d\b")  # how the error of a proxy begins that refuses to connect
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # hf_xet's words for an error of the system
_OF_NETWORKS: Final = {  # what the system says of connections, not of files
    *(errno.EPIPE, errno.EAGAIN, errno.EINTR, errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.ECONNABORTED),
    *(errno.ECONNRESET, errno.ENOTCONN, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EHOSTUNREACH),
}
_PROXIES = ("https_proxy", "http_proxy", "all_proxy")
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_SCHEMES = ("http", "https", "socks5", "socks5h")


_SECRETS = re.compile(
    r"\bhf_(?!transfer\b)[A-Za-z0-9]{8,}|(?<=Bearer )\S+|(?<=Basic )\S+|(?<=://)[^/\s@]+(?=@)"
    r"|(?i:(?<=token=)|(?<=signature=)|(?<=credential=))[^&\s\"']+"
)
_MIN_TOKEN = 4  # what is shorter could be part of any word


def redacted(text: str) -> str:
    """Return a text without the user's token, anything that looks like a token, and credentials in addresses."""
    from huggingface_hub import get_token

    known = (get_token(), *(os.environ.get(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")))
    for token in sorted({(token or "").strip() for token in known}, key=len, reverse=True):
        if len(token) >= _MIN_TOKEN:
            text = text.replace(token, "[token]")
    return _SECRETS.sub("[token]", text)


_ADDRESS = re.compile(r"(https?://)[^\s'\"]+")


class WithoutAddresses(logging.Filter):
    """Removes addresses and tokens from what the library logs: who has the address of an upload may upload."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = _ADDRESS.sub(r"\1[address]", redacted(record.getMessage()))
        record.args = ()
        record.exc_info = None  # its error has the address too
        return True


WITHOUT_ADDRESSES: Final = WithoutAddresses()


class HubRequestError(HubError):
    """One failed request; `transient` says whether a retry may help, `retry_after` how many seconds the Hub wants.

    In an outage (`is_outage`) nobody answers, or the Hub answers that it cannot: a retry may help later.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        status: int | None = None,
        transient: bool = False,
        is_outage: bool = False,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(redacted(message))
        self.reason = redacted(reason or message)
        self.status = status
        self.transient = transient
        self.is_outage = is_outage
        self.retry_after = retry_after


@contextmanager
def explained(action: str) -> Generator[None]:
    """Turn any error of the client library for a failed request into a HubRequestError that says what to do."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except HubError:
        raise
    except OfflineModeIsEnabled:
        raise offline_error() from None
    except HfHubHTTPError as error:
        response = error.response
        status: int = response.status_code
        words = cut(str(error.server_message or ""))
        advice = _advice(status, words) or (
            "The Hub has a problem. Run the same command again to continue."
            if status >= 500
            else "Run the same command again. If it fails again, the Hub's answer says why."
        )
        reason = f"the Hub answered {status}" + (f" ({words})" if words else "")
        raise HubRequestError(
            f"could not {action}: {reason}. {advice}",
            reason=reason,
            status=status,
            transient=status in TRANSIENT_STATUS,
            is_outage=status >= 500,
            retry_after=retry_after(response.headers),
        ) from error
    except (json.JSONDecodeError, _transport_error(), ConnectionError, TimeoutError, ssl.SSLError) as error:
        raise explain_transport(action, error) from error


@contextmanager
def of_known_form(action: str) -> Generator[None]:
    """Turn what the library raises for an answer of another form into a HubError. Only around calls of the library."""
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except (json.JSONDecodeError, K2ConvertError):
        raise
    except HFValidationError as error:
        raise HubError(f"could not {action}: {cut(str(error))}") from error
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise HubError(
            f"could not {action}: the answer was not the Hub's; it may be from a proxy or a login page. "
            "Check the network and HF_ENDPOINT, then run the same command again to continue."
        ) from error


@cache
def _transport_error() -> type[Exception]:
    """The base error of the library's HTTP client (httpx or httpx2): HfHubHTTPError derives from it."""
    from huggingface_hub.errors import HfHubHTTPError

    return next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError" and issubclass(base, Exception))


def explain_transport(
    action: str, error: Exception, *, failure: str = "the connection to the Hub failed"
) -> HubRequestError:
    """Return the error for a request without an answer of the Hub. hf_xet puts the status into the words of its own."""
    by_proxy = type(error).__name__ == "ProxyError"
    refused = _REFUSED.search(str(error))
    status = int(refused[1] or refused[2]) if refused and not by_proxy else None
    if status is not None and status not in TRANSIENT_STATUS:
        reason = f"the Hub answered {status} ({cut(str(error))})"
        advice = _advice(status, str(error)) or "Its answer says why; correct that first."
        return HubRequestError(f"could not {action}: {reason}. {advice}", reason=reason, status=status)
    reason = f"{failure} ({type(error).__name__}: {error})"
    if (of_system := _OS_ERROR.search(str(error))) and int(of_system[1]) not in _OF_NETWORKS:
        advice = "Check the disk and its free space, then run the same command again to continue."
        return HubRequestError(f"could not {action}: {reason}. {advice}", reason=reason)
    is_answered = isinstance(error, json.JSONDecodeError)
    if is_answered:
        reason = "the answer was not the Hub's; it may be from a proxy or a login page"
    set_here = [name for proxy in _PROXIES for name in (proxy, proxy.upper()) if os.environ.get(name)]
    network = " and ".join(["the network", *set_here])
    remedy = f"Check {network}, then"
    is_certificate = "CERTIFICATE_VERIFY_FAILED" in str(error)
    if is_certificate:
        remedy = "Name the file of your network's certificates in SSL_CERT_FILE (REQUESTS_CA_BUNDLE is not read), then"
    is_final = is_certificate or (by_proxy and _BY_PROXY.match(str(error)) is not None)
    return HubRequestError(
        f"could not {action}: {reason}. {remedy} run the same command again to continue.",
        reason=reason,
        transient=not is_final,
        is_outage=not is_final and not is_answered,
    )


def environment_error(error: Exception) -> HubError:
    """Return the error if no HTTP client can be made, with the variable that is the cause."""
    if isinstance(error, OSError):  # of which ssl.SSLError is one
        name = next((name for name in _CERTIFICATES if os.environ.get(name)), "the certificates")
        return HubError(
            f"{name}: the certificates cannot be read ({error.strerror or error}). Correct it, or unset it."
        )
    names = [name for proxy in (*_PROXIES, "no_proxy") for name in (proxy, proxy.upper()) if os.environ.get(name)]
    schemes = {name: os.environ[name].partition("://") for name in names}
    if isinstance(error, ImportError):
        name = next((name for name in names if schemes[name][0].startswith("socks")), "ALL_PROXY")
        return HubError(f"{name}: a SOCKS proxy needs the package socksio. {install_remedy(package='httpx[socks]')}")
    odd = [n for n in names if n.lower() != "no_proxy" and schemes[n][1] and schemes[n][0].lower() not in _SCHEMES]
    exceptions = [name for name in names if name.lower() == "no_proxy"]
    name = next(iter([*odd, *exceptions, *names]), "a proxy variable")
    return HubError(
        f"{name}: is not of a form that can be used ({cut(redacted(str(error)))}). Correct it, or unset it."
    )


def _advice(status: int, words: str) -> str | None:
    if status == 403 and "xet-write-token" in words:
        return _NO_TOKEN_ADVICE
    if status == 403 and _NO_ROOM.search(words):
        return _NO_ROOM_ADVICE
    return _ADVICE.get(status)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that the Hub asks to wait, at most an hour: a number or a date (RFC 9110, 10.2.3)."""
    value = headers.get("Retry-After", "").strip()
    if value.isascii() and value.isdecimal():
        return min(float(value), MAX_PAUSE_SECONDS)
    try:
        until = parsedate_to_datetime(value)
        seconds = until.replace(tzinfo=until.tzinfo or UTC).timestamp() - time.time()
    except (ValueError, OverflowError):
        return None
    return min(max(seconds, 0.0), MAX_PAUSE_SECONDS)


def offline_error() -> HubError:
    return HubError(
        "HF_HUB_OFFLINE is set, so k2convert cannot use the Hub. Unset it, or name a local folder: "
        "that never uses the network."
    )
