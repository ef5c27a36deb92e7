"""Each token's offset is where it begins in the text, by characters, whatever the tokens hold."""

import pytest
from hypothesis import example, given
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


def by_byte(data: bytes) -> list[int]:
    """Of each byte the character that it is in, where U+FFFD stands for each beginning of one, or single byte."""
    found: list[int] = []
    while data:
        try:
            part = len(data.decode()[0].encode())
        except UnicodeDecodeError as error:
            part = len(data[: error.start].decode()[0].encode()) if error.start else error.end
        found += [found[-1] + 1 if found else 0] * part
        data = data[part:]
    return found


def test_bytes_that_are_no_text_are_replaced_one_by_one() -> None:
    assert offsets(BYTES, [0xC3, 0xC3, 97, 0xE6, 0x97, 98, 0x97, 99]) == [0, 1, 2, 3, 3, 4, 5, 6]
    assert BYTES.decode([0xC3, 0xC3, 97, 0xE6, 0x97, 98, 0x97, 99]) == "\ufffd\ufffda\ufffdb\ufffdc"


PIECES = [b"a", b" \xe6", b"\xe6", b"\x97", b"\xa5", b"\x97\xa5", b"\xa5\xc3", b"\xf0\x9f", b"\x99\x82 b", b"\xff"]


@pytest.fixture(scope="module")
def pieces() -> Tokenizer:
    """Byte-level, of these pieces; the token after them is special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    hidden = iter(char for char in alphabet if ord(char) > 255)
    written = [chr(byte) if chr(byte) in alphabet else next(hidden) for byte in range(256)]
    vocabulary = {"".join(written[byte] for byte in piece): number for number, piece in enumerate(PIECES)}
    tokenizer = HuggingFaceTokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    return Tokenizer(FileCodec(tokenizer, None))


@given(token_ids=st.lists(st.integers(0, len(PIECES)), max_size=12))
@example(token_ids=[0, 2, 0])
@example(token_ids=[2, len(PIECES), 5, 0])
def test_a_token_begins_at_the_character_of_its_first_byte(pieces: Tokenizer, token_ids: list[int]) -> None:
    parts = [b"" if token_id == len(PIECES) else PIECES[token_id] for token_id in token_ids]
    places = by_byte(b"".join(parts))
    begins = [len(b"".join(parts[:number])) for number in range(len(parts))]
    found = offsets(pieces, token_ids)
    assert [found[n] for n, part in enumerate(parts) if part] == [
        places[begins[n]] for n, part in enumerate(parts) if part
    ]
    assert len(pieces.decode(token_ids)) == (places[-1] + 1 if places else 0)


def test_bytes_in_place_of_a_character_that_the_vocabulary_lacks() -> None:
    """As in SentencePiece: of a character that does not come, each byte is one U+FFFD."""
    tokenizer = HuggingFaceTokenizer(models.WordLevel({"<0xE6>": 0, "<0x97>": 1, "<0xA5>": 2, "a": 3}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    codec = Tokenizer(FileCodec(tokenizer, None))
    assert (codec.decode([0, 1, 2, 3]), offsets(codec, [0, 1, 2, 3])) == ("日a", [0, 0, 0, 1])
    assert (codec.decode([0, 1, 3, 3]), offsets(codec, [0, 1, 3, 3])) == ("\ufffd\ufffdaa", [0, 0, 2, 3])


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
