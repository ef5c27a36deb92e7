"""Cost of reading a request: CPU milliseconds a kilobyte of body, by what is in it, and how the cost grows with size.

Every body is made for one field or one way to be expensive, at three sizes up to the largest that the server reads.
`growth` is the cost a byte of the largest over that of the smallest: 1 where the cost is linear, less where a limit is
passed. One above 2 is no rule: the small body may be refused at its first item, and the large one only counted.
Not here: the time of template and tokenizer, which `runner/server/network/readers.py` limits.
"""

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.lib.record import write_record
from exeplan.runner.server.network.connection import MAX_BODY_BYTES
from exeplan.runner.server.openai.chat_request import ChatRequest
from exeplan.runner.server.openai.completion_request import CompletionRequest
from exeplan.runner.server.openai.errors import RequestError
from exeplan.runner.server.openai.generation_request import GenerationRequest, parse

SIZES = (MAX_BODY_BYTES // 64, MAX_BODY_BYTES // 8, MAX_BODY_BYTES)
Body = tuple[type[GenerationRequest], Callable[[int], bytes]]


def _completion(field: str, item: str, *, opening: str = "[", closing: str = "]", numbered: bool = False) -> Body:
    """A field that is a list, or object, of as many equal items as fit; `numbered` puts a number for each `#`."""
    rest = "" if field == "prompt" else '"prompt":"a",'

    def make(size: int) -> bytes:
        count = max((size - 40) // (len(item) + 1 + 5 * numbered), 1)
        items = (item.replace("#", str(number)) if numbered else item for number in range(count))
        return f'{{{rest}"{field}":{opening}{",".join(items)}{closing}}}'.encode()

    return CompletionRequest, make


def _text(field: str, char: str) -> Body:
    rest = "" if field == "prompt" else '"prompt":"a",'
    return CompletionRequest, lambda size: f'{{{rest}"{field}":"{char * (size // len(char))}"}}'.encode()


def _messages(one: str, *, opening: str = "[", closing: str = "]") -> Body:
    def make(size: int) -> bytes:
        return f'{{"messages":{opening}{",".join([one] * max(size // (len(one) + 1), 1))}{closing}}}'.encode()

    return ChatRequest, make


_PARTS = '[{"role":"user","content":['
_OBJECT: dict[str, Any] = {"opening": "{", "closing": "}"}
BODIES: dict[str, Body] = {
    "text": _text("prompt", "a "),
    "escaped text": _text("prompt", "\\u0001"),
    "half characters": _text("prompt", "\\ud800"),
    "brackets in text": _text("prompt", "[{"),
    "token ids": _completion("prompt", "12345"),
    "one-digit token ids": _completion("prompt", "1"),
    "lists of token ids": _completion("prompt", "[1,2,3]"),
    "texts": _completion("prompt", '"a"'),
    "objects as prompts": _completion("prompt", "{}"),
    "token ids, then a text": _completion("prompt", "1", closing=',"a"]'),
    "a key twice": _completion("logit_bias", '"1":1', **_OBJECT),
    "other keys": _completion("logit_bias", '"#":1', **_OBJECT, numbered=True),
    "token ids with zeros": _completion("logit_bias", '"0#":1', **_OBJECT, numbered=True),
    "wrong biases": _completion("logit_bias", '"#":"x"', **_OBJECT, numbered=True),
    "objects with a key twice": _completion("metadata", '{"a":1,"a":2}', opening='{"a":[', closing="]}"),
    "objects": _completion("metadata", "{}", opening='{"a":[', closing="]}"),
    "lists": _completion("metadata", "[]", opening='{"a":[', closing="]}"),
    "numbers": _completion("metadata", "1.2345678901234567e300", opening='{"a":[', closing="]}"),
    "long integers": _completion("metadata", "9" * 4000, opening='{"a":[', closing="]}"),
    "deep lists": _completion("metadata", "[" * 60 + "]" * 60, opening='{"a":[', closing="]}"),
    "stop strings": _completion("stop", '"a"'),
    "stop token ids": _completion("stop_token_ids", "1"),
    "tools of a completion": _completion("tools", "[0]"),
    "tools": _messages(
        '{"type":"function","function":{"name":"f"}}', opening='[{"role":"user","content":"a"}],"tools":['
    ),
    "calls": _messages(
        '{"function":{"name":"f","arguments":"{}"}}', opening='[{"role":"assistant","tool_calls":[', closing="]}]"
    ),
    "arguments of calls": _messages(
        '\\"a\\":1',
        opening='[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{',
        closing='}"}}]}]',
    ),
    "results of tools": _messages('{"role":"tool","content":"a","tool_call_id":"1"}'),
    "a schema": _completion("guided_json", '"#":1', opening="{", closing="}", numbered=True),
    "a schema as text": _text("guided_json", "[{"),
    "choices": _completion("guided_choice", '"a"'),
    "a regex": _text("guided_regex", "a|"),
    "modalities": _completion("modalities", '"text"'),
    "a label": _text("user", "a"),
    "a field of the wrong type": _completion("n", "1"),
    "unknown fields": _completion("x", '"#":1', opening="1,", closing="", numbered=True),
    "messages": _messages('{"role":"user","content":"a"}'),
    "empty messages": _messages("{}"),
    "empty parts": _messages('{"type":"text","text":""}', opening=_PARTS, closing="]}]"),
    "wrong parts": _messages("{}", opening=_PARTS, closing="]}]"),
    "numbers as parts": _messages("5", opening=_PARTS, closing="]}]"),
}
"""Made for a number of bytes, which they have nearly."""


def milliseconds(kind: type[GenerationRequest], body: bytes, repeats: int) -> float:
    """Median CPU time of reading a body, which is accepted or refused."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        with contextlib.suppress(RequestError):
            parse(kind, body)
        times.append(1000 * (time.process_time() - start))
    return statistics.median(times)


def measure(repeats: int) -> list[dict[str, Any]]:
    """A row a kind of body: milliseconds at each size, the most milliseconds a kilobyte of any, and growth."""
    rows = []
    for name, (kind, make) in BODIES.items():
        bodies = [make(size) for size in SIZES]
        times = [milliseconds(kind, body, repeats) for body in bodies]
        rates = [1000 * took / len(body) for took, body in zip(times, bodies, strict=True)]
        rows.append({"body": name, "ms": times, "ms_per_kb": max(rates), "growth": rates[-1] / max(rates[0], 1e-9)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the rows and write no record")
    args = parser.parse_args()
    rows = measure(args.repeats)
    if args.json:
        return print(json.dumps(rows))
    print(f"{'body':28}" + "".join(f"{size // 1024:>8} KiB" for size in SIZES) + "   ms/KB  growth")
    for row in rows:
        times = "".join(f"{took:9.2f} ms" for took in row["ms"])
        print(f"{row['body']:28}{times}  {row['ms_per_kb']:.4f}  {row['growth']:5.2f}")
    write_record("body-cost", {"sizes": SIZES, "repeats": args.repeats, "rows": rows})


if __name__ == "__main__":
    main()
