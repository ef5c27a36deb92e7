"""A mask allows exactly the tokens with which an output can still follow its grammar, and an end only where it does."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFace
from tokenizers import decoders, models, normalizers, pre_tokenizers

from exeplan.core.models.model import ModelSpec, load_model_spec
from exeplan.errors import InputError
from exeplan.kernels.select import REFERENCE
from exeplan.runner.compute.tokens.device_sampling import needs_tokens, sample_on_device
from exeplan.runner.compute.tokens.sampling import MAX_STRUCTURE_CHARS, SamplingParams, sample
from exeplan.runner.compute.tokens.structures import Matcher, Structures, check_grammar, compile_grammar
from exeplan.runner.engine.tokenizer import FileCodec, Tokenizer, structure_tokenizer
from exeplan.runner.server.openai.generation_request import Structure
from exeplan.runner.server.openai.structure import grammar_of

DEMO = load_model_spec("demo")
END = 257
MANY_FIELDS = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2000)}}
VOCABULARY = structure_tokenizer(DEMO)


@dataclass
class Row:
    """What sampling and structures read of a request."""

    sampling: SamplingParams
    output_token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = (END,)
    seed: int = 0
    matcher: Matcher | None = None

    @property
    def plain(self) -> bool:
        return self.sampling.plain


def grammar(kind: Any, value: Any) -> str:
    return grammar_of(Structure("response_format", kind, value))


def row(kind: str, value: Any, output: bytes = b"", **sampling: Any) -> Row:
    return Row(SamplingParams(**{"temperature": 0.0, **sampling}, structure=grammar(kind, value)), list(output))


def allowed(asking: Row, structures: Structures | None = None) -> list[int]:
    bits = (structures or Structures(lambda: VOCABULARY)).begin([asking])()[0]
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()


def byte_level(token: str) -> HuggingFace:
    """A vocabulary with this token."""
    made = HuggingFace(models.BPE(vocab={"a": 0, token: 1, "<e>": 2}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    made.add_special_tokens(["<e>"])
    return made


def scalars() -> st.SearchStrategy[dict[str, Any]]:
    bounds = st.tuples(st.integers(-99, 99), st.integers(0, 999))
    return st.one_of(
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "integer"}, {"const": "k"}]),
        st.builds(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[0] + b[1]}, bounds),
        st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
        st.builds(lambda e: {"enum": e}, st.lists(st.text(max_size=3), min_size=1, max_size=3, unique=True)),
        st.just({"type": "string", "pattern": "^[a-c]{1,3}$"}),
    )


def composed(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from(["a", "b", "\u00e9", 'q"'])
    objects = st.builds(
        lambda fields, drop: {
            "type": "object",
            "properties": fields,
            "required": sorted(fields)[drop:],
            "additionalProperties": False,
        },
        st.dictionaries(names, inner, max_size=3),
        st.integers(0, 2),
    )
    arrays = st.builds(
        lambda items, least, more: {"type": "array", "items": items, "minItems": least, "maxItems": least + more},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    return objects | arrays | st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner)


@settings(max_examples=60, deadline=None)
@given(st.recursive(scalars(), composed, max_leaves=6), st.randoms(use_true_random=False))
def test_whatever_is_allowed_leads_to_json_that_its_schema_accepts(schema: dict[str, Any], draw: random.Random) -> None:
    asking, structures = row("json", schema), Structures(lambda: VOCABULARY)
    while END not in (found := allowed(asking, structures)) or (len(found) > 1 and draw.random() < 0.5):
        asking.output_token_ids.append(draw.choice([token for token in found if token != END]))
    text = bytes(asking.output_token_ids).decode()
    assert jsonschema_rs.is_valid(schema, json.loads(text)), text


def test_an_output_ends_only_where_it_is_complete() -> None:
    assert END not in allowed(row("json", None, b'{"a": 1'))
    assert allowed(row("json", None, b'{"a": 1}')) == [END]
    assert allowed(row("choice", ["yes", "yesterday"], b"yes")) == [ord("t"), END]
    assert allowed(row("regex", "[0-9]{2}", b"1")) == list(b"0123456789")


def test_tokens_that_are_no_text_are_never_allowed() -> None:
    assert not {256, 258, DEMO.vocab_size - 1} & set(allowed(row("regex", r"(.|\n)+")))


def test_a_digit_is_one_of_ten() -> None:
    assert allowed(row("regex", r"\d")) == list(b"0123456789")


def test_a_request_that_is_computed_again_continues_where_it_was() -> None:
    structures, asking = Structures(lambda: VOCABULARY), row("regex", "abc|abd")
    for token in b"ab":
        allowed(asking, structures)
        asking.output_token_ids.append(token)
    elsewhere = row("regex", "abc|abd", b"ab")
    assert allowed(asking, structures) == allowed(elsewhere) == list(b"cd")


def test_choices_of_one_request_do_not_share_their_place() -> None:
    structures, first, second = Structures(lambda: VOCABULARY), row("regex", "ab"), row("regex", "ab")
    allowed(first, structures)
    first.output_token_ids.append(ord("a"))
    assert [allowed(first, structures), allowed(second, structures)] == [[ord("b")], [ord("a")]]


def test_no_end_before_min_tokens_unless_nothing_else_is_left() -> None:
    assert allowed(row("regex", "a+", b"a", min_tokens=3)) == [ord("a")]
    assert allowed(row("regex", "a", b"a", min_tokens=3)) == [END]


def test_rows_without_a_grammar_cost_nothing_and_start_nothing() -> None:
    def read() -> Any:
        raise AssertionError("the vocabulary is read")

    assert Structures(read).begin([Row(SamplingParams()), Row(SamplingParams(temperature=0.0))])() == {}


def test_a_grammar_that_cannot_be_followed_ends_its_request_only() -> None:
    lost, plain = row("choice", ["a"], b"x"), row("choice", ["b"])
    masks = Structures(lambda: VOCABULARY).begin([lost, plain])()
    logits = torch.zeros(2, DEMO.vocab_size)
    failed, chosen = sample(logits, [lost, plain], masks)
    assert failed is None
    assert chosen is not None
    assert chosen.token_id == ord("b")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("on_device", [False, True])
def test_bias_penalties_and_noise_choose_among_what_is_allowed(temperature: float, on_device: bool) -> None:
    wanted = {"temperature": temperature, "logit_bias": {ord("z"): 100.0, ord("1"): -100.0}, "top_k": 3, "logprobs": 2}
    rows = [row("choice", ["0", "1"], presence_penalty=1.0, **wanted), Row(SamplingParams(**wanted))]
    logits = torch.zeros(2, DEMO.vocab_size)
    logits[:, ord("z")] = 50.0
    masks = Structures(lambda: VOCABULARY).begin(rows)()
    if on_device:
        found = sample_on_device(logits, rows, REFERENCE, masks=masks).to_host()
    else:
        found = sample(logits, rows, masks)
    assert [token.token_id for token in found if token] == [ord("0"), ord("z")]
    assert found[0] is not None
    assert found[0].top_logprobs[0][0] == ord("z")  # By the model's own distribution.


def test_the_next_batch_waits_for_the_tokens_that_a_grammar_needs() -> None:
    assert needs_tokens([row("choice", ["a"])])


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("regex", "((((", "unclosed group"),
        ("regex", "(?=a)b", "look-ahead"),
        ("json", {"$ref": "#"}, "no output can satisfy it"),
        ("json", {"allOf": [{"$ref": "#"}], "type": "object"}, "circular references"),
        ("json", {"type": "strin"}, "Invalid type"),
        ("json", {"not": {"type": "string"}}, "not"),
        ("json", {"type": "string", "minLength": 4, "maxLength": 3}, "Unsatisfiable"),
        ("json", {"$ref": "https://example.org/x.json"}, "example.org"),
        ("json", MANY_FIELDS, "Too many|too large: compiling|schema too large"),
        ("json", {"type": "integer", "multipleOf": 123457}, "lexer error|too large: compiling"),
    ],
    ids=range(10),
)
def test_what_cannot_be_followed_is_refused_with_a_sentence(kind: str, value: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        check_grammar(VOCABULARY, grammar(kind, value))
    assert "\n" not in str(error.value)


def test_sound_grammars_are_taken() -> None:
    nested: dict[str, Any] = {"type": "integer"}
    for _ in range(50):
        nested = {"type": "array", "items": nested}
    for kind, value in (
        ("json", nested),
        ("json", {"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}),
        ("choice", [f"word {n}" for n in range(1000)]),
        ("choice", ['"', "\\", "\n", "/", "\U0001f600", "\x00"]),
        ("regex", r"^/a/(b|c)\n\w+$"),
        ("json", {"type": "string", "format": "date-time"}),
    ):
        check_grammar(VOCABULARY, grammar(kind, value))


def test_a_wrong_grammar_is_an_input_error() -> None:
    with pytest.raises(InputError):
        compile_grammar(VOCABULARY, "start: (")


def test_parameters_that_make_no_sense_with_a_grammar_are_refused() -> None:
    with pytest.raises(InputError, match="ignore_eos has no meaning for a structured output"):
        SamplingParams(structure="start: /a/", ignore_eos=True)
    with pytest.raises(InputError, match="structure must be a grammar of at most"):
        SamplingParams(structure="a" * (MAX_STRUCTURE_CHARS + 1))


def test_a_model_without_tokenizer_or_end_takes_no_grammar(tmp_path: Any) -> None:
    config = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 1, "vocab_size": 10, "max_position_embeddings": 16, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec: ModelSpec = load_model_spec(str(tmp_path))
    with pytest.raises(InputError, match="structured output needs a tokenizer, which this model lacks"):
        structure_tokenizer(spec)
    Structures(lambda: structure_tokenizer(spec)).load()


def metaspace(scheme: str) -> HuggingFace:
    """A vocabulary as SentencePiece has it: T5's, with a Metaspace decoder, or Llama 2's, with bytes."""
    pieces = ["<pad>", "<e>", "<unk>", "▁", "a", "▁a", "b", "▁b", "ab", '"', *(f"<0x{n:02X}>" for n in range(256))]
    if scheme == "T5":
        made = HuggingFace(models.Unigram([(piece, -1.0) for piece in pieces[:10]], 2))
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
        made = HuggingFace(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
        spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        made.normalizer, made.decoder = normalizers.Replace(" ", "▁"), decoders.Sequence(spaces)
    made.add_special_tokens(["<pad>", "<e>", "<unk>"])
    return made


@pytest.mark.parametrize("scheme", ["T5", "Llama 2"])
def test_pieces_of_sentencepiece_are_text_with_their_spaces(scheme: str) -> None:
    tokenizer = metaspace(scheme)
    size = tokenizer.get_vocab_size()
    codec = FileCodec(tokenizer, "<e>")
    vocabulary = codec.for_structures(size, [1])
    assert codec.drops_first_space
    assert not FileCodec(byte_level("b"), "<e>").drops_first_space
    structures = Structures(lambda: vocabulary)

    def names(asking: Row) -> set[str | None]:
        return {tokenizer.id_to_token(token) for token in allowed(asking, structures)} - {"<0x20>", "<0x61>", "<0x62>"}

    within = row("choice", ["ab a", "ab b", "b"])
    assert names(within) == {"a", "ab", "b"}
    within.output_token_ids.append(tokenizer.token_to_id("ab"))
    assert names(within) == {"▁", "▁a", "▁b"}
    first = Row(SamplingParams(structure=grammar_of(Structure("x", "choice", ["ab", "b"]), space_first=True)))
    assert names(first) == {"▁", "▁a", "▁b", "a", "ab", "b"}
    ended = row("choice", ["ab"])
    ended.output_token_ids.append(tokenizer.token_to_id("ab"))
    assert names(ended) == {"<e>"}


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        (HuggingFace(models.WordLevel({"a": 0, "<e>": 1}, unk_token="a")), "can't determine decoder type"),
        (byte_level("a" * 3000), "assertion failed"),  # llguidance panics at a token of that length.
    ],
    ids=["words", "a long token"],
)
def test_a_tokenizer_that_llguidance_cannot_read_is_refused(tokenizer: HuggingFace, words: str) -> None:
    codec = Tokenizer(FileCodec(tokenizer, "<e>"))
    spec = load_model_spec("demo")
    with pytest.raises(InputError, match=f"structured output does not work with this model's tokenizer: .*{words}"):
        structure_tokenizer(spec, codec)
