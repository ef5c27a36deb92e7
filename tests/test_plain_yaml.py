"""YAML is read by the core schema of YAML 1.2: no dates, no tags, no surprises, whatever the text."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exeplan.plain_yaml import YamlError, dump, load

_PIECES = [
    "a",
    "b: ",
    "- ",
    "? ",
    "[",
    "]",
    "{",
    "}",
    ",",
    "&x ",
    "*x",
    "!!int ",
    "! ",
    "<<: ",
    "'",
    '"',
    "|\n",
    ">-\n",
]
_PIECES += [
    "\n",
    "\n  ",
    "#",
    "---\n",
    "%YAML 1.1\n",
    "0x",
    "9" * 5_000,
    "2021-13-45",
    "1:30",
    ".inf",
    "é",
    "\t",
    "\x00",
]
_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_SCALARS |= st.sampled_from(
    ["no", "on", "1e5", "2026-01-01", "1:30", "0o7", "1_000", "~", "<<", "=", "-", ".nan", "0x"]
)
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=9), inner), max_leaves=9
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2026-01-01", "2026-01-01"),
        ("2021-13-45", "2021-13-45"),
        ("1:30", "1:30"),
        ("no", "no"),
        ("1_000", "1_000"),
        ("1e5", 1e5),
        ("-.inf", float("-inf")),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("False", False),
        ("~", None),
        ("{<<: 3}", {"<<": 3}),
    ],
)
def test_a_plain_scalar_is_what_the_core_schema_says(text: str, value: object) -> None:
    read = load(text)
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: &x [1]\nb: *x", "aliases such as *x are not accepted, write the value out at line 2"),
        ("a: !!float x", "the tag tag:yaml.org,2002:float is not accepted, write the plain value at line 1"),
        ("a: !!python/object/apply:os.getcwd []", "the tag tag:yaml.org,2002:python/object/apply:os.getcwd is not"),
        ("a: 1\na: 2", "a is given twice at line 2"),
        ("? [1]\n: 2", "a name must be text, not a list or a mapping at line 1"),
        ("a: " + "[" * 5_000, "nested more than 32 levels deep at line 1"),
        ("a: " + "9" * 5_000, "99999999999999999999... is too long for a number at line 1"),
        ("a: 1\n---\nb: 2", "found another document at line 2"),
    ],
)
def test_what_is_not_plain_is_refused_with_its_line(text: str, problem: str) -> None:
    with pytest.raises(YamlError) as refusal:
        load(text)
    assert str(refusal.value).startswith(problem)


@given(st.lists(st.sampled_from(_PIECES), max_size=30).map("".join) | st.text())
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    problem = ""
    try:
        load(text)
    except YamlError as error:
        problem = str(error)
    assert "\n" not in problem


@given(_VALUES)
def test_what_is_written_is_read_back(value: Any) -> None:
    assert load(dump(value)) == value
