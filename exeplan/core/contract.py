"""Contracts of files: values checked against the types that a dataclass declares, in sentences with value and remedy.

Not msgspec.convert: its messages name neither the value nor what works ("Expected `int`, got `str`"), and it would be a
compiled dependency of planning.
"""

from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from exeplan.errors import InputError


def is_number(value: object) -> bool:
    """Whether the value is a number; Python counts booleans among them, a file does not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: object) -> bool:
    """Whether the value is a whole number of at least 1."""
    return type(value) is int and value >= 1


_KINDS: dict[object, tuple[Callable[[object], bool], str]] = {
    str: (lambda value: isinstance(value, str), "text"),
    int: (is_count, "a positive integer"),
    float: (is_number, "a number"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    Mapping: (lambda value: isinstance(value, Mapping), "a mapping"),
}
"""What a value of each declared type must be; `int` declares a count."""


def check_types(body: Mapping[str, Any], declared: type) -> None:
    """Raises InputError for the first value that is not what its field declares; other types are left to the caller."""
    for name, hint in get_type_hints(declared).items():
        holds, what = _KINDS.get(_kind(hint), (None, ""))
        if name in body and holds is not None and not holds(body[name]):
            raise InputError(f"{name} must be {what}, found {body[name]!r}")


def _kind(hint: object) -> object:
    """`Mapping` for `Mapping[str, Any]`, `str` for `str | None`; None for a choice of types."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] if isinstance(hint, UnionType) else [hint]
    return get_origin(kinds[0]) or kinds[0] if len(kinds) == 1 else None
