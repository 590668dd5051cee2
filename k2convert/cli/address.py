"""Refuse a place that was probably meant as a repository of the Hub, before anything is made or asked for.

Without this, `hf:/me/out` and `me/out` would become folders, and a mistyped `owner/name` would wait for the network.
"""

import os
import re
from typing import Final

from k2convert.errors import HubError, shortened
from k2convert.hub.client import SCHEME, parse_repo

_MISSPELLED: Final = re.compile(r"hf(?::/*|/{2,})(?P<rest>.*)", re.IGNORECASE | re.DOTALL)
_PAGE: Final = re.compile(
    r"(?:https?:/+[^/]+|(?:www\.)?(?:huggingface\.co|hf\.co))/+(?:models/)?(?P<repo>[^/?#]+/[^/?#]+)"
    r"(?:/(?:tree|blob|resolve|commit)/(?P<revision>[^/?#]+))?.*",
    re.IGNORECASE | re.DOTALL,
)
_OTHER_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/.*", re.DOTALL)


def check_source(text: str) -> None:
    """Accept hf://owner/name, an existing path, and a path that cannot be a repository's name; else raise HubError."""
    check_not_address(text)
    if not text.startswith(SCHEME) and parse_repo(text) is not None:
        raise HubError(f"{text}: no such folder. If it is a repository of the Hub, write {SCHEME}{text}.")


def check_new_place(text: str) -> None:
    """The same for a place to write to. `a/b` is a folder only if `a` exists."""
    check_not_address(text)
    ref = None if text.startswith(SCHEME) else parse_repo(text)
    if ref is not None and not os.path.lexists(text.partition("/")[0]):
        raise HubError(
            f"{text}: a folder or a repository of the Hub? Write ./{text} for a folder, "
            f"or {SCHEME}{ref.repo} for a repository."
        )


def check_folder(text: str) -> None:
    """Refuse an address where only a folder of this machine can be used; raises HubError."""
    if not os.path.lexists(text) and (_MISSPELLED.fullmatch(text) or _PAGE.fullmatch(text)):
        raise HubError(f"{shortened(text)}: not a folder of this machine. Pass a folder.")


def check_not_address(text: str) -> None:
    """Refuse what looks like an address but is not hf://owner/name[@revision]; raises HubError."""
    if text.startswith(SCHEME):
        parse_repo(text)
        return
    if os.path.lexists(text):
        return
    suggested = f"{SCHEME}owner/name"
    if page := _PAGE.fullmatch(text):
        suggested = _if_repo(page["repo"] + (f"@{page['revision']}" if page["revision"] else ""))
    elif misspelled := _MISSPELLED.fullmatch(text):
        suggested = _if_repo(misspelled["rest"].lstrip("/"))
    elif not _OTHER_SCHEME.fullmatch(text):
        return
    raise HubError(f"{shortened(text)}: neither a folder nor a repository of the Hub. Write {suggested}.")


def _if_repo(name: str) -> str:
    try:
        return str(parse_repo(f"{SCHEME}{name}"))
    except HubError:
        return f"{SCHEME}owner/name"
