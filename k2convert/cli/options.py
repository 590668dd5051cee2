"""Arguments and options that verbs share, and the checks of addresses and sizes.

A place that was probably meant as a repository of the Hub is refused before anything is made or asked for. Without
this, `hf:/me/out` and `me/out` would become folders, and a mistyped `owner/name` would wait for the network.
"""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast, get_args

import typer

from k2convert.checkpoint.names import WORK_SUFFIX
from k2convert.choices import Device
from k2convert.errors import ArgumentError, HubError, parse_size, quoted, shortened
from k2convert.hub.client import SCHEME, parse_repo

if TYPE_CHECKING:
    from k2convert.records.command import JobCommand

ADDRESS: Final = "hf://owner/name[@revision]"
TEXT_FORMS: Final = '.txt, .jsonl with "text" or "messages", or token ids in .npy'
CHECKS: Final = "Output and checks"
MACHINE: Final = "Machine"
HUB: Final = "Hub"
"""Panels of a help with many options."""

RESUMES: Final = "finished work is kept. The same command resumes"
NOTHING_KEPT: Final = "nothing is kept. The same command starts again"
"""Sentences for an interrupt."""

_MISSPELLED: Final = re.compile(r"hf(?::/*|/{2,})(?P<rest>.*)", re.IGNORECASE | re.DOTALL)
_PAGE: Final = re.compile(
    r"(?:https?:/+[^/]+|(?:www\.)?(?:huggingface\.co|hf\.co))/+(?:models/)?(?P<repo>[^/?#]+/[^/?#]+)"
    r"(?:/(?:tree|blob|resolve|commit)/(?P<revision>[^/?#]+))?.*",
    re.IGNORECASE | re.DOTALL,
)
_OTHER_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/.*", re.DOTALL)


def refuse_contradictions(*contradictions: tuple[object, str]) -> None:
    """Raise BadParameter with the sentence of the first contradiction whose condition holds."""
    for is_wrong, sentence in contradictions:
        if is_wrong:
            raise typer.BadParameter(sentence)


def check_source(text: str) -> None:
    """Accept hf://owner/name, an existing path, and a path that cannot be a repository's name; else raise HubError."""
    check_not_address(text)
    if not text.startswith(SCHEME) and not os.path.lexists(text) and parse_repo(text) is not None:
        raise HubError(f"{text}: no such folder. If it is a repository of the Hub, write {SCHEME}{text}.")


def check_new_place(text: str) -> None:
    """The same for a place to write to. `a/b` is a folder only if `a` exists."""
    check_not_address(text)
    first = text.partition("/")[0]
    ref = None if not first or text.startswith(SCHEME) or os.path.lexists(first) else parse_repo(text)
    if ref is not None:
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


def check_status_place(text: str) -> None:
    """The same as `check_source`; the file of an unfinished evaluation is missing, but not its folder."""
    if not Path(f"{text}{WORK_SUFFIX}").is_dir():
        check_source(text)


def check_size(text: str) -> None:
    """Refuse what is not a size; raises BadParameter."""
    try:
        parse_size(text)
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from None


def _at_home(value: Any) -> Any:
    """Return a path with the folder for `~`, which a shell leaves alone in quotes and behind `=`."""
    is_home = isinstance(value, str | Path) and str(value).startswith("~")
    return type(value)(os.path.expanduser(value)) if is_home else value  # noqa: PTH111 - an unknown user is no error


def _callback(check: Callable[[str], None] | None) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        given = [_at_home(entry) for entry in cast(list[object], value if isinstance(value, list) else [value])]
        for entry in given:
            if entry is not None and check is not None:
                check(str(entry))
        if isinstance(value, list):
            return given
        return given[0]

    return checked


def argument(name: str, help: str, check: Callable[[str], None] | None = None) -> Any:
    """Define an argument. `name` is what help calls it."""
    return typer.Argument(metavar=name, help=help, callback=_callback(check), show_default=False)


def option(
    help: str,
    metavar: str | None = None,
    panel: str | None = None,
    *,
    name: str | None = None,
    check: Callable[[str], None] | None = None,
    **limits: Any,
) -> Any:
    """Define an option; `metavar` is its value in help, else the choices; `limits` are `min`, `max`, or a `parser`."""
    names = () if name is None else (name,)
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, callback=_callback(check), **limits)


def flag(name: str, help: str, panel: str | None = None) -> Any:
    """Define an option without a value."""
    return typer.Option(name, help=help, rich_help_panel=panel)


def _device(text: str) -> Device:
    if text not in get_args(Device):
        raise typer.BadParameter(
            f"{quoted(text)} is not auto, cpu or cuda. For other machines, see `k2convert guide calibrate`."
        )
    return cast(Device, text)


SourceArgument = Annotated[
    str, argument("SOURCE", f"Folder of the INT4 or MXFP4 checkpoint, or {ADDRESS}.", check_source)
]
ResultArgument = Annotated[str, argument("DEST", f"Folder of the converted checkpoint, or {ADDRESS}.", check_source)]
Json = Annotated[bool, flag("--json", "Print one JSON document on stdout, not tables.", CHECKS)]
Quiet = Annotated[bool, flag("--quiet", "Show no progress on stderr.", CHECKS)]
SourceOption = Annotated[
    str | None,
    option(f"INT4 or MXFP4 source, a folder or {ADDRESS}: measures every weight.", "SOURCE", check=check_source),
]
Yes = Annotated[bool, flag("--yes", "Publish without asking at the start. Needed without a terminal.", HUB)]
Public = Annotated[bool, flag("--public/--private", "Visibility of a new repository.", HUB)]
MaxDisk = Annotated[
    str | None,
    option(
        "Most disk to use at any time, with the Hub: 200GB [default: 90 % of the free space].",
        "BYTES",
        MACHINE,
        check=check_size,
    ),
]
DeviceOption = Annotated[
    Device, option("Device that computes layers: auto, cpu or cuda.", "DEVICE", MACHINE, parser=_device)
]


def typed_command(*, source: str, without: str = "") -> "JobCommand":
    """Return the command of this process as it was typed, but without one option and its value."""
    from k2convert.records.command import JobCommand  # which loads pydantic: help would be slow

    words = ["k2convert", *sys.argv[1:]]
    if without in words:
        del words[words.index(without) : words.index(without) + 2]
    words = [word for word in words if not without or not word.startswith(f"{without}=")]
    return JobCommand(tuple(words), str(Path.cwd()), source)
