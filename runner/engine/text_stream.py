"""TextStream: incremental detokenization of one output; never half a character, never the start of a stop string.

A token is not a unit of text: it may hold part of a UTF-8 character, and whether it has a leading space may depend on
the token before. So a window of tokens is decoded together, and the text that is new is delivered.
"""

from collections.abc import Callable, Sequence

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
        self.stopped = False
        self._decode, self._stops = decode, stops
        self._held = ""
        # `_num_decoded` tokens of the window, that is `_num_chars` characters, have been delivered or held.
        self._window, self._num_decoded, self._num_chars = _context(decode, prompt_token_ids)

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """The text that can be delivered now. Stop strings are ignored unless `may_stop`."""
        text = self._decoded(token_id)
        if not self._stops or not may_stop:
            return text
        self._held += text
        return self._before_stop()

    def finish(self) -> str:
        """The text held back, after the last token; an incomplete character becomes U+FFFD, as in `decode`."""
        if self.stopped:
            return ""
        rest, self._held = self._held, ""
        return rest + self._decode(self._window)[self._num_chars :]

    def _decoded(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(BROKEN) and len(self._window) - self._num_decoded < _MAX_PENDING:
            return ""
        new, before = text[self._num_chars :], self._num_decoded
        self._num_decoded, self._num_chars = len(self._window), len(text)
        if len(self._window) > _MAX_WINDOW:
            self._window = self._window[before:]
            self._num_decoded, self._num_chars = len(self._window), len(self._decode(self._window))
        return new

    def _before_stop(self) -> str:
        text = self._held
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        kept = max(_overlap(text, stop) for stop in self._stops)
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


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
