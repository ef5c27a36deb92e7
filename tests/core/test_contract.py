"""A value that is not of the type its field declares is named with what it must be."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from exeplan.core.contract import check_types
from exeplan.errors import InputError


@dataclass
class File:
    text: str
    count: int | None
    number: float | None
    flag: bool
    mapping: Mapping[str, Any]
    mixed: int | str
    other: tuple[int, ...]


def test_values_of_their_types_pass_and_missing_ones_are_not_asked_for() -> None:
    check_types({"text": "a", "count": 1, "number": 2, "flag": False, "mapping": {}, "mixed": "a", "other": [1]}, File)
    check_types({"number": -0.5, "unknown": None}, File)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("text", 5, "text must be text, found 5"),
        ("count", 0, "count must be a positive integer, found 0"),
        ("count", True, "count must be a positive integer, found True"),
        ("count", 1.0, "count must be a positive integer, found 1.0"),
        ("number", "1", "number must be a number, found '1'"),
        ("number", False, "number must be a number, found False"),
        ("flag", 1, "flag must be true or false, found 1"),
        ("mapping", [1], r"mapping must be a mapping, found \[1\]"),
    ],
)
def test_other_values_are_refused(name: str, value: object, sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{sentence}$"):
        check_types({name: value}, File)
