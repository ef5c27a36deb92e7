"""An object checked against its declared model, and what pydantic found as one sentence: field, value, limit."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from exeplan.runner.server.openai.errors import RequestError
from exeplan.runner.server.openai.fields import NotOfferedError
from exeplan.runner.server.openai.json_body import short

Model = TypeVar("Model", bound=BaseModel)


def check(kind: type[Model], given: Mapping[str, Any]) -> Model:
    """A JSON object as a declared model. Raises RequestError with the most precise finding."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _readable(error, given) from None


_REASONS = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "must be a token id",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "too_long": "holds {num_entries} entries, at most {max_length} are taken",
    "too_short": "must not be empty",
    "literal_error": "must be {expected}",
    "value_error": "{error}",
}
_WITHOUT_VALUE = ("value_error", "too_long")


def _readable(error: ValidationError, given: Mapping[str, Any]) -> RequestError:
    """The most precise finding as one sentence: the deepest, and of a union the branch whose type fits."""
    findings = [(_path(found, given), found) for found in error.errors(include_url=False)]
    path, finding = max(findings, key=lambda entry: (len(entry[0]), not entry[1]["type"].endswith("_type")))
    kind, name = finding["type"], short(".".join(path), quoted=False)
    if kind == "extra_forbidden":
        return RequestError(f"unknown field '{name}'", param=name)
    if kind == "missing":
        return RequestError(f"'{name}' is missing", param=name)
    reasons = [_reason(finding)]
    if kind.endswith("_type"):
        others = [_reason(other) for where, other in findings if where == path and other is not finding]
        reasons += [reason.removeprefix("must be ") for reason in others]
    value = short(finding["input"])
    if finding["type"] == "value_error" and isinstance(finding["ctx"]["error"], NotOfferedError):
        return RequestError(f"{name}={value} {reasons[0]}", param=name)
    shown = "" if kind in _WITHOUT_VALUE else f", found {value}"
    return RequestError(f"{name} {' or '.join(reasons)}{shown}", param=name)


def _reason(finding: Mapping[str, Any]) -> str:
    found = finding["input"]
    more = {"num_entries": len(found)} if isinstance(found, (list, dict)) else {}
    return _REASONS.get(finding["type"], finding["msg"]).format(**finding.get("ctx", {}), **more)


def _path(finding: Mapping[str, Any], given: Any) -> list[str]:
    """The place of a finding in the body. pydantic also names the branches of unions, which are no part of it."""
    where = finding["loc"]
    missing = [where[-1]] if finding["type"] == "missing" else []
    path, at = [], given
    for part in where[: len(where) - len(missing)]:
        if part in at if isinstance(at, dict) else isinstance(at, list) and isinstance(part, int):
            path.append(part)
            at = at[part]
    return [str(part) for part in (*path, *missing)]
