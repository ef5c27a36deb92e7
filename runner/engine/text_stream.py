"""TextStream: incremental detokenization of one output; never half a character, never the start of a stop string.

A token is not a unit of text: it may hold part of a UTF-8 character, and whether it has a leading space may depend on
the token before. So a window of tokens is decoded together, and the text that is new is delivered.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What decoders put in place of an incomplete character."""
_CONTEXT = 5
"""Prompt tokens that are decoded together with the first output tokens."""
_CHAR_TOKENS = 4
"""The most tokens of one character: UTF-8 uses up to four bytes."""
_MAX_WINDOW = 12
_MAX_PENDING = 24
"""Tokens that may wait for the end of a character. Beyond that they are bytes that are no text."""


class TextStream:
    """Turns token ids into pieces of text, whose concatenation is the text of the output.

    `stopped` becomes True when one of `stops` has appeared; the text ends before it.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt_token_ids: Sequence[int], stops: Sequence[str] = ()
    ) -> None:
        self.stopped = self._may_stop = False
        self._decode, self._stops = decode, [_Search(stop) for stop in stops]
        self._held = ""
        # `_num_decoded` tokens of the window, that is `_num_chars` characters, have been delivered or held.
        self._window, self._num_decoded, self._num_chars = _context(decode, prompt_token_ids)

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """The text that can be delivered now. Stop strings are ignored unless `may_stop`."""
        self._may_stop = bool(self._stops) and may_stop
        text = self._decoded(token_id)
        return self._before_stop(text) if self._may_stop else text

    def finish(self) -> str:
        """The text held back, after the last token; an incomplete character becomes U+FFFD, as in `decode`. The text
        before such a character may still have a stop string."""
        if self.stopped:
            return ""
        text = self._decode(self._window)[self._num_chars :]
        text = self._before_stop(text) if self._may_stop else text
        rest, self._held = self._held, ""
        return text + rest

    def _decoded(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(BROKEN) and len(self._window) - self._num_decoded < _MAX_PENDING:
            return ""
        new, before = text[self._num_chars :], self._num_decoded
        self._num_decoded, self._num_chars = len(self._window), len(text)
        if len(self._window) > _MAX_WINDOW:
            # After a hidden token alone, the next one would count as the first of a text, and lose its space.
            self._window = self._window[before:] if new else self._window[:before]
            self._num_decoded, self._num_chars = len(self._window), len(self._decode(self._window))
        return new

    def _before_stop(self, new: str) -> str:
        found, text = [stop.push(new) for stop in self._stops], self._held + new
        ends = [(len(self._held) + end - stop.length) for stop, end in zip(self._stops, found, strict=True) if end]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        kept = max(stop.matched for stop in self._stops)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _context(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> tuple[list[int], int, int]:
    """The last tokens of a prompt, how many of them form whole characters, and the number of these characters."""
    for size in range(_CONTEXT, _CONTEXT + _CHAR_TOKENS):
        tail = list(token_ids[-size:])
        for missing in range(min(_CHAR_TOKENS, len(tail) + 1)):  # A prompt may end inside a character.
            text = decode(tail[: len(tail) - missing])
            if not text.startswith(BROKEN) and not text.endswith(BROKEN):
                return tail, len(tail) - missing, len(text)
    # Every end is inside a character, or the tokens are no text.
    return tail, 0, len(decode(tail).removesuffix(BROKEN))


class _Search:
    """One string in a text that comes in pieces, by the method of Knuth, Morris and Pratt: the time of a character does
    not depend on the string's length. `matched` is how many characters at the end of the text begin the string.
    """

    def __init__(self, wanted: str) -> None:
        self._wanted, self.length, self.matched = wanted, len(wanted), 0
        self._borders = _borders(wanted)

    def push(self, text: str) -> int | None:
        """How many characters of this piece there are up to the end of the string's first appearance."""
        for place, character in enumerate(text):
            self.matched = _longer(self._wanted, self._borders, self.matched, character)
            if self.matched == self.length:
                return place + 1
        return None


def _longer(wanted: str, borders: Sequence[int], matched: int, character: str) -> int:
    """How much of the string the text ends with after one more character."""
    while matched and wanted[matched] != character:
        matched = borders[matched - 1]
    return matched + (wanted[matched] == character)


@lru_cache(1024)
def _borders(wanted: str) -> tuple[int, ...]:
    """Of each beginning of a string, the longest other beginning that it ends with."""
    borders = [0]
    for character in wanted[1:]:
        borders.append(_longer(wanted, borders, borders[-1], character))
    return tuple(borders)
