"""Each token's offset is where it begins in the text, by characters, whatever the tokens hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import decoders, models, pre_tokenizers

from exeplan.runner.engine.tokenizer import ByteCodec, FileCodec, Tokenizer
from exeplan.runner.server.openai.text_offsets import TextOffsets, TokenTexts

BYTES = Tokenizer(ByteCodec())


def offsets(tokenizer: Tokenizer, token_ids: list[int], prompt: str = "") -> list[int]:
    found = TextOffsets(TokenTexts(tokenizer), prompt)
    return [found.next(token_id) for token_id in token_ids]


@given(st.text(alphabet="aé☃\N{GRINNING FACE} "))
def test_the_bytes_of_a_character_begin_together(text: str) -> None:
    expected = [number for number, char in enumerate(text) for _ in char.encode()]
    assert offsets(BYTES, list(text.encode())) == expected
    assert offsets(BYTES, list(text.encode()), text) == expected


def test_bytes_that_are_no_text_are_replaced_one_by_one() -> None:
    """As in the text: four bytes that begin a character are given up together."""
    assert offsets(BYTES, [0xC3, 0xC3, 0xC3, 0xC3, 97, 98]) == [0, 0, 0, 0, 4, 5]
    assert BYTES.decode([0xC3] * 4) == "\N{REPLACEMENT CHARACTER}" * 4


@pytest.fixture
def words() -> Tokenizer:
    """Words with their spaces, and one before the first, as SentencePiece has them; 3 is special."""
    tokenizer = HuggingFaceTokenizer(models.WordLevel({"▁a": 0, "▁bc": 1, "d": 2}, unk_token="d"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>"])
    return Tokenizer(FileCodec(tokenizer, None))


def test_the_space_before_the_first_word_is_none_of_a_prompt(words: Tokenizer) -> None:
    assert offsets(words, [0, 1, 0], "a bc a") == [0, 1, 4]


def test_special_tokens_are_in_a_text_only_where_a_prompt_has_them(words: Tokenizer) -> None:
    assert offsets(words, [3, 0, 1], "a bc") == [0, 0, 1]
    assert offsets(words, [3, 0, 1], "<s> a bc") == [0, 3, 5]
    assert offsets(words, [0, 3, 1]) == [0, 2, 2]


def test_an_output_begins_where_its_prompt_ends(words: Tokenizer) -> None:
    found = TextOffsets(TokenTexts(words), "a")
    assert found.next(0) == 0
    found.end_prompt()
    assert [found.next(1), found.next(0)] == [1, 4]
