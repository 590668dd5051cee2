"""Functions of the package run in another program: they check their arguments, and put back what they change.

The command line checks its options itself, and sets up a process of its own (resources.own_process, bound_memory).
"""

import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import cast

from k2convert.errors import ArgumentError, K2ConvertError, MachineError, explain, quoted, require_extra
from k2convert.job.resources import restoring_process
from k2convert.records.events import SILENT, Events


@contextmanager
def host_process(*, torch_for: str | None = None, uses_torch: bool = False) -> Generator[None]:
    """Run a function of the package in the block; raises MissingDependencyError, MachineError instead of OSError."""
    if torch_for is not None:
        require_extra("calibrate", purpose=torch_for)
    with restoring_process(uses_torch=uses_torch or torch_for is not None):
        try:
            yield
        except K2ConvertError:
            raise
        except OSError as error:
            raise MachineError(str(explain(error, resumes=True))) from error


def read_path(name: str, given: object) -> str:
    """Return a path or an address as text; raises ArgumentError for what is neither, and for what names no file."""
    try:
        text = os.fsdecode(given)  # type: ignore[arg-type]  # its errors are below
        os.fsencode(text)
    except (TypeError, UnicodeError):
        raise ArgumentError(f"{name} {quoted(given)}: expected a path, or an address as text.") from None
    if not text or "\0" in text:
        raise ArgumentError(f"{name} {quoted(given)}: no file has such a name. Choose a different one.")
    return text


def read_optional_path(name: str, given: object) -> str | None:
    """Return a path or an address as text, or None if none is given; raises ArgumentError."""
    if given is None:
        return None
    return read_path(name, given)


def read_events(given: object) -> Events:
    """Return where events go, by default nowhere; raises ArgumentError for anything but an object of the class."""
    if given is None:
        return SILENT
    if Events not in type(given).__mro__:
        raise ArgumentError(f"events {quoted(given)}: expected an object of a subclass of k2convert.Events.")
    return cast(Events, given)


def read_layers(given: object) -> tuple[int, ...]:
    """Return numbers of layers, none for "all"; raises ArgumentError."""
    if given == "all":
        return ()
    numbers = tuple(cast(Iterable[object], given)) if isinstance(given, list | tuple | range) else ()
    if not numbers or any(type(number) is not int for number in numbers):
        raise ArgumentError(f'layers {quoted(cast(object, given))}: expected numbers in a list, or "all".')
    return cast(tuple[int, ...], numbers)


def read_paths(name: str, given: object, *, least: int = 1) -> list[str]:
    """Return several paths or addresses as text. One that is not in a list counts as one. Raises ArgumentError."""
    if isinstance(given, str | bytes) or hasattr(given, "__fspath__"):
        return [read_path(name, given)]
    if not isinstance(given, Iterable):
        raise ArgumentError(f"{name} {quoted(given)}: expected paths in a list.")
    paths = [read_path(name, path) for path in cast(Iterable[object], given)]
    if len(paths) < least:
        raise ArgumentError(f"{name}: expected at least one path.")
    return paths
