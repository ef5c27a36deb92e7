"""YAML as a person reads it: the core schema of YAML 1.2 (text, numbers, true and false, null, lists, mappings).

Not YAML 1.1, which PyYAML's safe loader reads: there 2026-01-01 is a date, 1:30 is 90, `no` is false and 1e5 is text.
Tags, aliases (which can expand without limit) and a name given twice are refused, and so is deep nesting.
Source: YAML 1.2.2, section 10.3.
"""

import re
from typing import Any, NoReturn

import yaml

MAX_DEPTH = 32
_PATTERNS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}


class YamlError(ValueError):
    """What is wrong with the text, and in which line where that is known."""


def load(text: str) -> Any:
    """The one document in the text. Raises YamlError."""
    try:
        return _Loader(text).get_single_data()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"a control character at line {line}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}" if mark else ""
        raise YamlError(f"{str(error.problem).removeprefix('but ')}{where}") from None


def dump(value: Any) -> str:
    """Text that `load` reads as the same value; short lists and mappings in one line of at most 110 characters."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=110))


class _Loader(yaml.SafeLoader):
    """Composes with a limit of depth; builds text, numbers, booleans, null, lists and mappings only."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 - as the base class declares it
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]  # types-PyYAML leaves it untyped
        if isinstance(event, yaml.AliasEvent):
            _refuse(f"aliases such as *{event.anchor} are not accepted, write the value out", event)
        if getattr(event, "tag", None) is not None:
            _refuse(f"the tag {event.tag} is not accepted, write the plain value", event)
        if self.depth == MAX_DEPTH:
            _refuse(f"nested more than {MAX_DEPTH} levels deep", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                _refuse("a name must be text, not a list or a mapping", key)
            if key.value in names:
                _refuse(f"{key.value} is given twice", key)
            names.add(key.value)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """`<<` is a name like any other: without aliases there is nothing to merge."""

    def integer(self, node: yaml.ScalarNode) -> int:
        """A decimal, octal or hexadecimal integer; Python refuses thousands of decimal digits."""
        try:
            return int(node.value, 0 if node.value.startswith(("0o", "0x")) else 10)
        except ValueError:
            _refuse(f"{node.value[:20]}... is too long for a number", node)

    def real(self, node: yaml.ScalarNode) -> float:
        """A number with a point or an exponent, `.inf` or `.nan`."""
        return float(re.sub(r"\.(?=inf|nan)", "", node.value.lower()))


class _Dumper(yaml.SafeDumper):
    """Quotes what the loader would not read as text."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 - as the base class declares it

    def ignore_aliases(self, data: object) -> bool:
        return True


def _refuse(problem: str, at: Any) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


for _kind, (_pattern, _first) in _PATTERNS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.real)
