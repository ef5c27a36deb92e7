"""Cost of structured output: CPU microseconds to compile a schema and for each token's mask, at two vocabularies.

The vocabularies are byte-level BPE trained on the sources of Python itself, so that nothing is downloaded. Every
library that is installed takes the same tokens of the same documents: one that conforms to a schema, one of any JSON,
one of a regex. llguidance is what the server uses, with the limits of the server; xgrammar and outlines-core are
measured where they are installed, as their defaults have them. A token's time is mask and advance.
Not here: grammars made to be slow (`tests/runner/server/test_structured_output.py`).
"""

import argparse
import importlib.util
import json
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.lib.record import write_record
from exeplan.runner.compute.tokens.structures import compile_grammar

VOCABULARIES = (50_000, 128_000)
_TRAINING_CHARS = 40_000_000
_LONGEST_TOKEN = 24
_END = "<|end|>"
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["new", "known", "gone"]}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
_DOCUMENT = {
    "name": "Ada Lovelace, countess",
    "age": 36,
    "tags": ["new", "known"],
    "address": {"street": "12 Saint James's Square", "zip": "10115"},
}
_FREE = {"list": [1, 2.5, None, True, {"deeper": ["a text of some words", "another"]}], "x": {"y": "z"}}
CASES: dict[str, tuple[str, Any, str]] = {
    "schema": ("json", _SCHEMA, json.dumps(_DOCUMENT)),
    "any object": ("json", {"type": "object"}, json.dumps(_FREE)),
    "regex": (
        "regex",
        r"[A-Z][a-z]{2,20}( [A-Z][a-z]{2,20}){1,3}, [0-9]{4}-[0-9]{2}-[0-9]{2}",
        "Ada King Noel, 1843-09-05",
    ),
}


class Follower(Protocol):
    """A compiled grammar at the beginning of an output."""

    def mask(self) -> object:
        """Computes which tokens are allowed next."""

    def take(self, token_id: int) -> None:
        """Goes on by a token."""


Compiler = Callable[[str, Any], Follower]
"""From the kind of a case and its schema or regex."""


def _sources() -> Iterator[str]:
    num_chars = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        text = path.read_text(errors="ignore")
        num_chars += len(text)
        if num_chars > _TRAINING_CHARS:
            return
        yield text


def train(vocab_size: int) -> Tokenizer:
    """A vocabulary of at most that many tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        max_token_length=_LONGEST_TOKEN,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sources(), trainer)
    return tokenizer


def _token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Of every token by id; byte-level BPE writes bytes as printable characters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    names = [tokenizer.id_to_token(number) for number in range(tokenizer.get_vocab_size())]
    return [b"" if name == _END else bytes(byte_of[character] for character in name) for name in names]


def llguidance(tokenizer: Tokenizer) -> Compiler:
    from llguidance import LLMatcher, LLTokenizer

    end = tokenizer.token_to_id(_END)
    assert end is not None
    vocabulary = LLTokenizer(tokenizer.to_str(), tokenizer.get_vocab_size(), [end])

    class Guided:
        def __init__(self, kind: str, value: Any) -> None:
            make = LLMatcher.grammar_from_json_schema if kind == "json" else LLMatcher.grammar_from_regex
            self._matcher = compile_grammar(vocabulary, make(value))

        def mask(self) -> object:
            return self._matcher.compute_bitmask()

        def take(self, token_id: int) -> None:
            assert self._matcher.consume_token(token_id), self._matcher.get_error()

    return Guided


def xgrammar(tokenizer: Tokenizer) -> Compiler:
    import xgrammar as xgr

    info = xgr.TokenizerInfo(
        _token_bytes(tokenizer), vocab_type=xgr.VocabType.RAW, stop_token_ids=[tokenizer.token_to_id(_END)]
    )
    bits = xgr.allocate_token_bitmask(1, tokenizer.get_vocab_size())

    class Matched:
        def __init__(self, kind: str, value: Any) -> None:
            compiler = xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            if kind == "json":
                compiled = compiler.compile_json_schema(json.dumps(value), any_whitespace=True)
            else:
                compiled = compiler.compile_regex(value)
            self._matcher = xgr.GrammarMatcher(compiled)

        def mask(self) -> object:
            return self._matcher.fill_next_token_bitmask(bits)

        def take(self, token_id: int) -> None:
            assert self._matcher.accept_token(token_id)

    return Matched


def outlines_core(tokenizer: Tokenizer) -> Compiler:
    import outlines_core
    from outlines_core.json_schema import build_regex_from_schema

    end, tokens = tokenizer.token_to_id(_END), _token_bytes(tokenizer)
    by_bytes: dict[bytes, list[int]] = {}
    for number, token in enumerate(tokens):
        if number != end:
            by_bytes.setdefault(token, []).append(number)
    vocabulary = outlines_core.Vocabulary(end, by_bytes)
    words = np.zeros(-(-len(tokens) // 32), dtype=np.int32)

    class Walked:
        def __init__(self, kind: str, value: Any) -> None:
            regex = build_regex_from_schema(json.dumps(value)) if kind == "json" else value
            self._guide = outlines_core.Guide(outlines_core.Index(regex, vocabulary))

        def mask(self) -> object:
            return self._guide.write_mask_into(words.ctypes.data, words.size, words.itemsize)

        def take(self, token_id: int) -> None:
            self._guide.advance(token_id, return_tokens=False)

    return Walked


LIBRARIES = {"llguidance": llguidance, "xgrammar": xgrammar, "outlines-core": outlines_core}


def _microseconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return 1e6 * (time.process_time() - began)


def measure(compiler: Compiler, kind: str, value: Any, tokens: list[int], repeats: int) -> dict[str, float]:
    """Microseconds of CPU: median of compiling, and of masks with advancing over all tokens and repeats."""
    compiles, steps = [], []
    for _ in range(repeats):
        made: list[Follower] = []
        compiles.append(_microseconds(lambda made=made: made.append(compiler(kind, value))))
        (follower,) = made
        for token in tokens:
            took = _microseconds(follower.mask)
            steps.append(took + _microseconds(lambda token=token, follower=follower: follower.take(token)))
    p99 = float(np.percentile(steps, 99))
    return {"compile": statistics.median(compiles), "token": statistics.median(steps), "p99": p99, "most": max(steps)}


def rows_of(tokenizer: Tokenizer, repeats: int) -> list[dict[str, Any]]:
    """A row a library and case; a case that a library cannot follow has the reason."""
    rows = []
    for name, load in LIBRARIES.items():
        if importlib.util.find_spec(name.replace("-", "_")) is None:
            continue
        began = time.process_time()
        compiler = load(tokenizer)
        loading = time.process_time() - began
        common = {"library": f"{name} {version(name)}", "vocabulary": tokenizer.get_vocab_size(), "loading_s": loading}
        for case, (kind, value, text) in CASES.items():
            try:
                found: dict[str, Any] = measure(compiler, kind, value, tokenizer.encode(text).ids, repeats)
            except Exception as error:  # Of a library, each with kinds of its own.
                found = {"refused": str(error)[:200]}
            rows.append({**common, "case": case, **found})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    rows = [row for size in VOCABULARIES for row in rows_of(train(size), args.repeats)]
    print(f"{'library':22}{'tokens':>8}{'loading':>10}  {'case':12}{'compile':>12}{'a token':>10}{'p99':>9}{'most':>9}")
    for row in rows:
        if "refused" in row:
            figures = f"  refused: {row['refused'][:60]}"
        else:
            figures = f"{row['compile']:9.0f} us{row['token']:7.0f} us{row['p99']:6.0f} us{row['most']:6.0f} us"
        print(f"{row['library']:22}{row['vocabulary']:8}{row['loading_s']:8.2f} s  {row['case']:12}{figures}")
    write_record("structured-cost", {"repeats": args.repeats, "rows": rows})


if __name__ == "__main__":
    main()
