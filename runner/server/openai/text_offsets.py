"""Text offsets: at which character of an answer's text each of its tokens begins.

A token is not a unit of text: one may hold a part of a character, whose tokens then begin together, and special tokens
are not in the text, unless a prompt that was given as text has them.
"""

from collections.abc import Sequence
from functools import lru_cache

from exeplan.runner.engine.text_stream import BROKEN
from exeplan.runner.engine.tokenizer import Tokenizer

_KEPT = 1 << 16
_CHAR_TOKENS = 4
"""The most tokens of one character: UTF-8 uses up to four bytes."""


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

    def together(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def _is_hidden(self, token_id: int) -> bool:
        return not self._tokenizer.decode([token_id])


class TextOffsets:
    """Of the tokens of one text, one after the other."""

    def __init__(self, texts: TokenTexts, prompt: str = "") -> None:
        """`prompt` is what the text begins with: its tokens come first."""
        self._texts, self._prompt, self._offset = texts, prompt, 0
        self._parts: list[int] = []
        """Tokens of a character that is not complete."""

    def end_prompt(self) -> None:
        """The tokens of the output follow."""
        self._offset, self._prompt, self._parts = len(self._prompt), "", []

    def next(self, token_id: int) -> int:
        """Of the next token."""
        offset, text = self._offset, self._texts.text(token_id)
        if BROKEN not in text and not self._parts:
            self._offset += self._length(token_id, text)
            return offset
        self._parts.append(token_id)
        known = self._texts.together(self._parts)
        if not known.endswith(BROKEN) or len(self._parts) == _CHAR_TOKENS:
            self._offset += len(known)
            self._parts = []
        return offset

    def _length(self, token_id: int, text: str) -> int:
        """Characters of the text that are a token's, which has whole ones."""
        if self._prompt.startswith(text, self._offset):
            return len(text)
        if self._texts.is_hidden(token_id):
            return 0
        # Many tokenizers put a space before the first word, which is none of the text.
        begins = bool(self._prompt) and self._offset == 0 and text.startswith(" ")
        return len(text) - (begins and self._prompt.startswith(text[1:]))
