"""Text offsets: at which character of an answer's text each of its tokens begins.

A token is not a unit of text: one may hold a part of a character, whose tokens then begin together, and special tokens
are not in the text, unless a prompt that was given as text has them.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from exeplan.runner.engine.tokenizer import Tokenizer

_KEPT = 1 << 16


@dataclass(frozen=True, slots=True)
class _Begun:
    """The beginning of a character whose other bytes have not come."""

    utf8: bytes
    token_ids: tuple[int, ...]
    """Those that have it."""
    num_chars_before: int
    """In the text of the first of them."""


_NOTHING = _Begun(b"", (), 0)


class TokenTexts:
    """The texts of a model's tokens; those of single ones are kept."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.text = lru_cache(_KEPT)(tokenizer.token_text)
        """Of one token, as within a text; a special one by its name."""
        self.utf8 = lru_cache(_KEPT)(tokenizer.token_bytes)
        """Of one token, whose text may have only a part of a character."""
        self.is_hidden = lru_cache(_KEPT)(self._is_hidden)
        """Whether a token is none of an output's text."""

    @property
    def are_known(self) -> bool:
        """Whether there is a tokenizer: without one all texts are empty."""
        return self._tokenizer.codec is not None

    def together(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def _is_hidden(self, token_id: int) -> bool:
        return not self._tokenizer.decode([token_id])


class TextOffsets:
    """Of the tokens of one text, one after the other."""

    def __init__(self, texts: TokenTexts, prompt: str = "") -> None:
        """`prompt` is what the text begins with: its tokens come first."""
        self._texts, self._prompt, self._offset = texts, prompt, 0
        self._begun = _NOTHING

    def end_prompt(self) -> None:
        """The tokens of the output follow."""
        self._offset, self._prompt, self._begun = len(self._prompt), "", _NOTHING

    def next(self, token_id: int) -> int:
        """Of the next token."""
        utf8 = self._texts.utf8(token_id)
        if self._begun.utf8 and not self._prompt and self._texts.is_hidden(token_id):
            return self._offset
        if self._begun.utf8 and not _continues(self._begun.utf8, utf8):
            self._give_up()
        offset, begun = self._offset, self._begun
        text, num_read = codecs.utf_8_decode(begun.utf8 + utf8, "replace")
        rest = (begun.utf8 + utf8)[num_read:]
        whole = not begun.utf8 and not rest
        self._offset += self._length(token_id, self._texts.text(token_id)) if whole else len(text)
        if not rest:
            self._begun = _NOTHING
        elif begun.utf8 and not text:
            self._begun = _Begun(rest, (*begun.token_ids, token_id), begun.num_chars_before)
        else:
            before = utf8[: -len(rest)].decode(errors="replace")
            self._begun = _Begun(rest, (token_id,), len(before))
        return offset

    def _give_up(self) -> None:
        """What has begun becomes no character: some decoders put U+FFFD in its place, others in that of each byte."""
        self._offset += len(self._texts.together(self._begun.token_ids)) - self._begun.num_chars_before
        self._begun = _NOTHING

    def _length(self, token_id: int, text: str) -> int:
        """Characters of the text that are a token's, which has whole ones."""
        if self._prompt.startswith(text, self._offset):
            return len(text)
        if self._texts.is_hidden(token_id):
            return 0
        # Many tokenizers put a space before the first word, which is none of the text.
        begins = bool(self._prompt) and self._offset == 0 and text.startswith(" ")
        return len(text) - (begins and self._prompt.startswith(text[1:]))


def _continues(begun: bytes, utf8: bytes) -> bool:
    """Whether a character of which there is only the beginning goes on with the first of these bytes."""
    text, num_read = codecs.utf_8_decode(begun + utf8[:1], "replace")
    return not text or (len(text) == 1 and num_read > len(begun))
