"""The JSON object in a body: strict JSON, no field twice, in linear time; and a short form of any value."""

import json
import re
from collections import Counter
from itertools import islice
from typing import Any

from exeplan.runner.server.openai.errors import RequestError

MAX_OBJECT_FIELDS = 4096
"""Of any object in a body: bounds the work of saying what is wrong with it."""
MAX_OBJECTS = 32_768
"""Lists and objects in a body."""
MAX_DEPTH = 64
"""Of lists and objects in each other: far below what any later step could fail at."""


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body: strict JSON, no field twice. Raises RequestError saying what is wrong.

    The time is linear in the bytes, and nothing that is returned is deeper than `MAX_DEPTH`.
    """
    try:
        _check_count(body)
        value = json.loads(body.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise RequestError(
            f"the body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise _too_deep() from None
    except RequestError:
        raise
    except ValueError:  # Python refuses to convert integers of thousands of digits.
        raise RequestError("the body holds a number that is too long") from None
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    if b"\\u" in body:  # The only way a lone surrogate gets through the decoder.
        _check_text(value)
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return value


def _check_count(body: bytes) -> None:
    """Before anything is made of it: the memory of small things is many times that of their bytes."""
    if body.count(b"[") + body.count(b"{") <= MAX_OBJECTS:
        return
    bare = _STRING.sub(b"", body)
    if bare.count(b"[") + bare.count(b"{") > MAX_OBJECTS:
        raise RequestError(f"the body has more than {MAX_OBJECTS} lists and objects")


_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""It matches at every quotation mark, so that each byte is looked at once."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_OBJECT_FIELDS:
        message = f"an object of the body has {len(pairs)} fields, at most {MAX_OBJECT_FIELDS} are taken"
        raise RequestError(message)
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = short(Counter(name for name, _ in pairs).most_common(1)[0][0], quoted=False)
        raise RequestError(f"the body has the field '{twice}' twice", param=twice)
    return found


def _check_depth(value: Any) -> None:
    """Level by level, as a recursion would fail where the call stack is deep already."""
    level = [value]
    for _ in range(MAX_DEPTH):
        members = (each.values() if isinstance(each, dict) else each for each in level)
        level = [member for each in members for member in each if isinstance(member, (dict, list))]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> RequestError:
    return RequestError(f"the body is nested too deeply; at most {MAX_DEPTH} levels are taken")


def _check_text(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("the body holds half of a surrogate pair, which is not a character") from None


def _no_constant(name: str) -> float:
    raise RequestError(f"the body holds {name}, which is not a JSON number")


def short(value: Any, *, quoted: bool = True) -> str:
    """The first characters of a value; of a long one no more is written than is shown."""
    if isinstance(value, str):
        text = json.dumps(value[:61]) if quoted else value[:61]
    else:
        text = "".join(islice(_PIECES.iterencode(value), 61))
    return text if len(text) <= 60 else text[:57] + "..."


_PIECES = json.JSONEncoder()
