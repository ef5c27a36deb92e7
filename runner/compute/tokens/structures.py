"""Structured output: which tokens a request's grammar allows next, by llguidance.

A grammar is a text that llguidance reads; `runner/server/openai/structure.py` makes it of a JSON schema, a regex or
choices. Every process that samples compiles it for itself and advances it over the output so far, so that a request may
be computed again, by other workers too, and continues where it was. Masks are computed in a thread, without Python's
global lock, while the model computes the logits. `LIMITS` bound the work of one mask, `check_grammar` that of
compiling.
Not here: what clients may ask for, and the vocabulary's bytes (`runner/engine/tokenizer.py`).

Letters: V vocabulary.
"""

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from exeplan.errors import InputError
from exeplan.runner.compute.tokens.sampling import SamplingInput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILE_SECONDS = 0.05
"""Of CPU time; what the engine may have to wait for. A schema of a hundred fields takes a few milliseconds."""
LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "max_items_in_row": 1_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 50_000,
}
"""llguidance's units: 50,000 steps of the lexer and 10,000 items take up to 10 ms, 20,000 states about 10 MB."""
_MAX_COMPILED = 16
"""Grammars that are kept compiled: the choices of a request share one, and often requests do."""
Bits: TypeAlias = NDArray[np.uint8]
"""A bit a token, `[V / 8]`, the lowest first: whether it is allowed. Empty where none can be found."""
Masks: TypeAlias = Mapping[int, Bits]
"""By row of the logits; of the rows that have a grammar."""
_NONE: Bits = np.empty(0, dtype=np.uint8)
log = logging.getLogger(__name__)


class StructuredInput(SamplingInput, Protocol):
    """The part of a request that `Structures` reads, and where it keeps the request's matcher."""

    matcher: "Matcher | None"


class Matcher:
    """One output's place in its grammar."""

    def __init__(self, found: "LLMatcher") -> None:
        self._found, self._num_taken = found, 0

    def allowed(self, output_token_ids: Sequence[int]) -> Bits:
        """After this output, which begins with the one of the last call. Raises InputError where that is too costly."""
        new = output_token_ids[self._num_taken :]
        if new and not self._found.is_stopped():
            self._found.consume_tokens(list(new))
        self._num_taken = len(output_token_ids)
        bits = np.frombuffer(self._found.compute_bitmask(), dtype=np.uint8)
        if self._found.is_error():
            raise InputError(_sentence(self._found.get_error()))
        return bits


class Structures:
    """The masks of one process that samples; `tokenizer` is called once, when the first of them is needed."""

    def __init__(self, tokenizer: "Callable[[], LLTokenizer]") -> None:
        self._read = tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def load(self) -> None:
        """Reads the vocabulary, so that the first grammar need not wait for it; not where the model has none to read.

        A hundred thousand tokens take half a second.
        """
        with contextlib.suppress(InputError):  # Of which a request with a grammar is told.
            self._vocabulary()

    def begin(self, rows: Sequence[StructuredInput]) -> Callable[[], Masks]:
        """Begins to compute the masks of the rows that have a grammar. Call what it returns to wait for them."""
        wanted = [(i, row) for i, row in enumerate(rows) if not row.plain and row.sampling.structure is not None]
        if not wanted:
            return _no_masks
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="structures")
        return self._thread.submit(self._masks, wanted).result

    def _masks(self, rows: Sequence[tuple[int, StructuredInput]]) -> Masks:
        return {i: self._mask(row) for i, row in rows}

    def _mask(self, row: StructuredInput) -> Bits:
        """No bits at all where the grammar turns out to be too costly: the request ends then, and no other does."""
        try:
            if row.matcher is None:
                row.matcher = Matcher(self._compile(row.sampling.structure or ""))
            bits = row.matcher.allowed(row.output_token_ids)
        except InputError as error:
            log.warning("a structured output ends: %s", error)
            return _NONE
        early = len(row.output_token_ids) < row.sampling.min_tokens
        return _without(bits, row.banned_token_ids) if early else bits

    def _vocabulary(self) -> "LLTokenizer":
        if self._tokenizer is None:
            self._tokenizer = self._read()
        return self._tokenizer

    def _compile(self, grammar: str) -> "LLMatcher":
        found = self._compiled.get(grammar)
        if found is None:
            found = self._compiled[grammar] = compile_grammar(self._vocabulary(), grammar)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return found.deep_copy()


def _no_masks() -> Masks:
    return {}


def compile_grammar(tokenizer: "LLTokenizer", grammar: str) -> "LLMatcher":
    """Raises InputError with the reason where the grammar is wrong, or needs more than `LIMITS`."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**LIMITS, verbose_errors=False)
    found = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if found.is_error():
        raise InputError(_sentence(found.get_error()))
    return found


def check_grammar(tokenizer: "LLTokenizer", grammar: str) -> None:
    """Raises InputError where no output has this grammar, or finding its first token takes too long."""
    began = time.thread_time()
    bits = Matcher(compile_grammar(tokenizer, grammar)).allowed(())
    taken = time.thread_time() - began
    if not bits.any():
        raise InputError("no output can satisfy it")
    if taken > MAX_COMPILE_SECONDS:
        raise InputError(
            f"it is too large: compiling it takes {1e3 * taken:.0f} ms, at most {1e3 * MAX_COMPILE_SECONDS:g} are taken"
        )


def _without(bits: Bits, token_ids: Sequence[int]) -> Bits:
    """Without these tokens, unless no other is left: an output that is complete ends."""
    rest = bits.copy()
    for token_id in token_ids:
        rest[token_id >> 3] &= ~np.uint8(1 << (token_id & 7))
    return rest if rest.any() else bits


def _sentence(message: str) -> str:
    """llguidance's reason without the grammar and the parser's state that it shows with it."""
    if message.startswith("NoExtension"):
        return "no output can satisfy it"
    reasons = [line for line in message.split("\n") if line.startswith("error: ")]
    return (reasons[-1].removeprefix("error: ") if reasons else message.partition("\n")[0])[:300]
