"""Shared parts of options of several verbs: definitions, checks of addresses and sizes, and how a verb gets them.

A place that was probably meant as a repository of the Hub is refused before anything is made or asked for. Without
this, `hf:/me/out` and `me/out` would become folders, and a mistyped `owner/name` would wait for the network.
"""

import inspect
import os
import re
import sys
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast, get_type_hints

import typer

from k2convert.checkpoint.names import WORK_SUFFIX
from k2convert.cli.interrupts import say_when_interrupted
from k2convert.errors import ArgumentError, HubError, parse_size, shortened
from k2convert.hub.client import SCHEME, parse_repo

if TYPE_CHECKING:
    from k2convert.records.command import JobCommand

_MISSPELLED: Final = re.compile(r"hf(?::/*|/{2,})(?P<rest>.*)", re.IGNORECASE | re.DOTALL)
_PAGE: Final = re.compile(
    r"(?:https?:/+[^/]+|(?:www\.)?(?:huggingface\.co|hf\.co))/+(?:models/)?(?P<repo>[^/?#]+/[^/?#]+)"
    r"(?:/(?:tree|blob|resolve|commit)/(?P<revision>[^/?#]+))?.*",
    re.IGNORECASE | re.DOTALL,
)
_OTHER_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/.*", re.DOTALL)


REQUIRED: Final = MISSING
_SHOWN: Final = "shown"

NOTHING_KEPT: Final = "nothing is kept. The same command starts again"
_RESUMES: Final = "finished work is kept. The same command resumes"
_INTERRUPTED: Final[dict[str, str]] = {
    **dict.fromkeys(("run", "prune", "evaluate"), _RESUMES),
    "publish": "what was uploaded is kept. The same command resumes",
    "validate": NOTHING_KEPT,
}
"""Sentences of verbs that are interrupted before they have begun to count. Others have none: they take seconds."""


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
        given = [_at_home(one) for one in cast(list[object], value if isinstance(value, list) else [value])]
        for one in given:
            if one is not None and check is not None:
                check(str(one))
        if isinstance(value, list):
            return given
        return given[0]

    return checked


def argument(name: str, help: str, check: Callable[[str], None] | None, default: Any = REQUIRED) -> Any:
    """Define an argument, as a field of a verb's options. `name` is what help calls it."""
    shown = typer.Argument(metavar=name, help=help, callback=_callback(check), show_default=False)
    return field(default=default, metadata={_SHOWN: shown})


def option(
    help: str,
    metavar: str | None = None,
    panel: str | None = None,
    *,
    default: Any = None,
    name: str | None = None,
    check: Callable[[str], None] | None = None,
    **limits: Any,
) -> Any:
    """Define an option; `metavar` is its value in help, else the choices; `limits` are `min`, `max`, or a `parser`."""
    names = () if name is None else (name,)
    shown = typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, callback=_callback(check), **limits)
    return field(default=default, metadata={_SHOWN: shown})


def flag(name: str, help: str, panel: str | None = None) -> Any:
    """Define an option without a value, as a field of a verb's options."""
    return field(default=False, metadata={_SHOWN: typer.Option(name, help=help, rich_help_panel=panel)})


def verb(options: type) -> Callable[..., None]:
    """Return the command `run` of RunOptions, with its fields and docstring; calls function `run` of module `run`."""
    name = options.__name__.removesuffix("Options").lower()

    def command(**values: Any) -> None:
        from k2convert.cli import console

        console.Asked.json = values.get("json", False)
        console.Asked.quiet = values.get("quiet", False)
        said = "" if values.get("dry_run") else _INTERRUPTED.get(name, "")
        say_when_interrupted(lambda: said, resumes=bool(said) and name != "validate")
        getattr(import_module(f"{__package__}.{name}"), name)(options(**values))

    hints = get_type_hints(options)
    signature = inspect.signature(options)
    shown = {known.name: Annotated[hints[known.name], known.metadata[_SHOWN]] for known in fields(options)}
    given = [each.replace(annotation=shown[each.name]) for each in signature.parameters.values()]
    command.__name__ = name
    command.__doc__ = options.__doc__
    command.__signature__ = signature.replace(parameters=given)  # type: ignore[attr-defined]  # what typer reads
    return command


def typed_command(*, source: str, without: str = "") -> "JobCommand":
    """Return the command of this process as it was typed, but without one option and its value."""
    from k2convert.records.command import JobCommand  # which loads pydantic: help would be slow

    words = ["k2convert", *sys.argv[1:]]
    if without in words:
        del words[words.index(without) : words.index(without) + 2]
    words = [word for word in words if not without or not word.startswith(f"{without}=")]
    return JobCommand(tuple(words), str(Path.cwd()), source)
