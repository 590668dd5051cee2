"""JSON documents that cannot be changed: what was read stays as it was read, wherever it is passed.

Libraries complete the configs that they get in place. A frozen document makes that a TypeError instead of a result
with other numbers. It is still a dict of dicts and lists, so json encodes it and isinstance knows it.
"""

from typing import Any, NoReturn, cast


def _refuse(_self: object, *_args: object, **_options: object) -> NoReturn:
    raise TypeError("this document is frozen: change a copy")


class FrozenDict(dict[str, Any]):
    """A dict without its methods that change it."""

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return freeze, (dict(self),)

    def __deepcopy__(self, memo: object) -> dict[str, Any]:
        return thaw(self)


class FrozenList(list[Any]):
    """A list without its methods that change it."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse  # type: ignore[assignment]
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return freeze, (list(self),)

    def __deepcopy__(self, memo: object) -> list[Any]:
        return thaw(self)


def freeze(document: Any) -> Any:
    """Return a JSON document that cannot be changed, at any depth."""
    if isinstance(document, dict):
        return FrozenDict({key: freeze(value) for key, value in cast(dict[str, Any], document).items()})
    if isinstance(document, list):
        return FrozenList([freeze(value) for value in cast(list[Any], document)])
    return document


def thaw(document: Any) -> Any:
    """Return a copy of a JSON document that may be changed."""
    if isinstance(document, dict):
        return {key: thaw(value) for key, value in cast(dict[str, Any], document).items()}
    if isinstance(document, list):
        return [thaw(value) for value in cast(list[Any], document)]
    return document
