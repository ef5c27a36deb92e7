"""A Tokenizer agrees with transformers on the same files, and its streams concatenate to the decoded text."""

import json
import subprocess
import sys
import time
from datetime import date

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import GPT2TokenizerFast, PreTrainedTokenizerFast

from exeplan.core.models.model import model_spec
from exeplan.errors import InputError
from exeplan.runner.engine.text_stream import TextStream
from exeplan.runner.engine.tokenizer import FileCodec, Tokenizer, eos_token_ids

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "naïve café — 你好，世界 🙂🙃",
    "  two  spaces\n\tand a tab",
] * 3
TEXTS = [*CORPUS[:3], "", " ", "unseen: ✓ \U0001f9ea", "<s> is special", "a\u0301 combining"]
SIZES = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 64,
}
CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {% generation %}{{ m.content }}{% endgeneration %}"
CHAT += "{{ eos_token }}\n{% endfor %}{% if tools is not none %}tools{% endif %}{{ messages[0] | tojson(indent=1) }}"
CHAT += "{% if add_generation_prompt %}[assistant]{% endif %}"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>you</b> 🙂"}]
unhurried = settings(deadline=None)


def byte_level() -> HuggingFaceTokenizer:
    """Like GPT-2 and Llama 3."""
    tokenizer = HuggingFaceTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback() -> HuggingFaceTokenizer:
    """Like Llama 2 and Mistral: spaces are part of words, one is added in front, unknown characters become bytes."""
    tokenizer = HuggingFaceTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokens = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(tokens)
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=specials, show_progress=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # For training only: merges stay in words.
    tokenizer.train_from_iterator(CORPUS[:1], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:3]  # Bytes are ordinary tokens.
    content["pre_tokenizer"] = None
    tokenizer = HuggingFaceTokenizer.from_str(json.dumps(content))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback}


@pytest.fixture(scope="module", params=KINDS)
def both(request, tmp_path_factory):
    """Our tokenizer and transformers' for the same directory."""
    directory = tmp_path_factory.mktemp(request.param)
    theirs = PreTrainedTokenizerFast(tokenizer_object=KINDS[request.param](), bos_token="<s>", eos_token="</s>")
    theirs.chat_template = CHAT
    theirs.save_pretrained(directory)
    return load(directory), theirs


SHIPPED = Tokenizer.load(model_spec({**SIZES, "vocab_size": 300}, name="shipped"))
BYTE_LEVEL = Tokenizer(FileCodec(byte_level(), None))


def load(directory, **config) -> Tokenizer:
    return Tokenizer.load(model_spec({**SIZES, "vocab_size": 500, **config}, name="tiny", directory=directory))


# Files


@pytest.mark.parametrize("text", TEXTS)
def test_encodes_and_decodes_as_transformers_does(both, text):
    ours, theirs = both
    token_ids = ours.encode(text)
    assert token_ids == theirs(text).input_ids
    assert ours.decode(token_ids) == theirs.decode(token_ids, skip_special_tokens=True)


def test_a_conversation_is_rendered_as_by_transformers(both):
    ours, theirs = both
    expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(MESSAGES) == expected


def test_vocab_and_merges_suffice(tmp_path):
    trained = byte_level()
    trained.model.save(str(tmp_path))
    config = {"bos_token": "</s>", "eos_token": {"content": "</s>"}, "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load(tmp_path)
    theirs = GPT2TokenizerFast.from_pretrained(tmp_path, bos_token="</s>", eos_token="</s>", unk_token="</s>")
    for text in TEXTS:
        expected = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text) == [trained.token_to_id("</s>"), *expected]
        assert ours.decode(ours.encode(text)) == text
    assert ours.eos_token_ids == (trained.token_to_id("</s>"),)


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "RobertaTokenizerFast"])
def test_vocab_and_merges_of_another_tokenizer_are_refused(kind, tmp_path):
    byte_level().model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    with pytest.raises(InputError, match=f"merges.txt do not say how {kind} splits a text; write a tokenizer.json"):
        load(tmp_path)


def test_a_shipped_model_works_on_bytes():
    assert SHIPPED.encode("aé") == [256, 97, 0xC3, 0xA9]
    assert SHIPPED.decode([256, 97, 0xC3, 0xA9, 257, 280]) == "aé<280>"
    assert SHIPPED.eos_token_ids == (257,)
    assert SHIPPED.decode(SHIPPED.encode_chat(MESSAGES)).endswith("user: Hi <b>you</b> 🙂\nassistant:")


@pytest.mark.parametrize(
    "make",
    [lambda path: Tokenizer.load(model_spec({**SIZES, "vocab_size": 250}, name="small")), load],
    ids=["small", "empty"],
)
def test_without_a_tokenizer_only_token_ids_work(make, tmp_path):
    tokenizer = make(tmp_path)
    assert tokenizer.stream([1, 2]) is None
    assert tokenizer.decode([1, 2]) == tokenizer.token_text(1) == ""
    with pytest.raises(InputError, match=r"this model has no tokenizer .* give the prompt as token ids"):
        tokenizer.encode("hello")
    with pytest.raises(InputError, match="stop strings need a tokenizer"):
        tokenizer.stream([1, 2], stops=["x"])


@pytest.mark.parametrize("content", ["", "[]", "{", "\ud800"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "vocab.json"])
def test_a_corrupt_file_is_named(tmp_path, name, content):
    (tmp_path / "merges.txt").touch()
    (tmp_path / name).write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(InputError, match=name):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, ()),
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": [2, 3]}, None, (2, 3)),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 8]}, (7, 8)),
        ({"eos_token_id": 2}, {"temperature": 0.6}, (2,)),
        ({"eos_token_id": None}, None, ()),
    ],
)
def test_end_of_sequence_comes_from_the_generation_config_first(tmp_path, config, generation, expected):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    spec = model_spec({**SIZES, "vocab_size": 500, **config}, name="tiny", directory=tmp_path)
    assert eos_token_ids(spec) == expected


def test_tokenizing_needs_no_torch():
    script = (
        "import sys, exeplan.runner.engine.tokenizer, exeplan.runner.compute.tokens.sampling as s; s.SamplingParams()"
    )
    subprocess.run([sys.executable, "-c", f"{script}; sys.exit('torch' in sys.modules)"], check=True)


def test_text_that_is_not_unicode_is_refused(both):
    with pytest.raises(InputError, match="character 2 of the prompt is half of a surrogate pair"):
        both[0].encode("ab\ud800")


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(both):
    text = "x" * 50_000_000
    began = time.thread_time()
    with pytest.raises(InputError, match="50000000 characters, which is more than 64 tokens can hold"):
        both[0].check_length(text, 64)
    assert time.thread_time() - began < 1  # Of this thread alone: microseconds, where tokenizing takes many seconds.
    both[0].check_length(CORPUS[0], len(both[0].encode(CORPUS[0])))


# Chat templates


def with_template(directory, template) -> Tokenizer:
    byte_level().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "bos_token": "<s>"}))
    return load(directory)


def test_the_default_one_of_named_templates_is_taken(tmp_path):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    tokenizer = with_template(tmp_path, named)
    assert tokenizer.decode(tokenizer.encode_chat(MESSAGES)) == "yes"


@pytest.mark.parametrize("where", ["config", "files"])
def test_the_template_for_tools_is_taken_where_a_conversation_has_them(where, tmp_path):
    source = "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}{% endfor %}{{ messages | length }}"
    if where == "config":
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": source}]
    else:
        named = "not read"
        (tmp_path / "chat_template.jinja").write_text("plain")
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(source)
    tokenizer = with_template(tmp_path, named)
    tool = {"type": "function", "function": {"name": "look"}}
    answered = [*MESSAGES, {"role": "tool", "content": "3"}]
    called = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [tool]}]
    given = [(MESSAGES, None), (MESSAGES, [tool]), (answered, None), (called, None)]
    texts = [tokenizer.decode(tokenizer.encode_chat(messages, tools=tools)) for messages, tools in given]
    assert texts == ["plain", "<tool_call>look2", "3", "3"]
    assert (tokenizer.chat_template.takes_tools, tokenizer.chat_template.tool_format) == (True, "hermes")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert theirs.apply_chat_template(MESSAGES, tools=[tool], tokenize=False) == texts[1]


def test_a_template_knows_the_date(tmp_path):
    tokenizer = with_template(tmp_path, "{{ strftime_now('%Y-%m-%d') }}")
    before = date.today().isoformat()
    assert tokenizer.decode(tokenizer.encode_chat(MESSAGES)) in (before, date.today().isoformat())


def test_a_template_file_wins(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages | length }}{{ {'ü': '<'} | tojson }}")
    tokenizer = with_template(tmp_path, "no")
    assert tokenizer.decode(tokenizer.encode_chat(MESSAGES)) == '2{"ü": "<"}'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "this model has no chat template, so it takes completions only"),
        ("{{ raise_exception('roles must alternate') }}", "does not take these messages: roles must alternate"),
        ("{{ messages[0].nothing.at_all }}", "does not take these messages: .* has no attribute 'nothing'"),
        ("{{ messages.__class__.__mro__ }}", "does not take these messages: access to attribute '__class__'"),
        ("{% for i in range(10**9) %}x{% endfor %}", "does not take these messages: Range too big"),
        ("{{ messages.append(1) }}", "does not take these messages"),
        ("{{ 1 / 0 }}", "does not take these messages: division by zero"),
    ],
)
def test_a_template_that_fails_says_so(tmp_path, template, message):
    with pytest.raises(InputError, match=message):
        with_template(tmp_path, template).encode_chat(MESSAGES)


@pytest.mark.parametrize("template", ["{% for %}", "{{ " + "(" * 9_000, "{{ 'a' | nothing }}"])
def test_an_invalid_template_is_refused_when_the_model_is_loaded(tmp_path, template):
    with pytest.raises(InputError, match="the model's chat template is not valid"):
        with_template(tmp_path, template)


def test_a_template_is_loaded_without_computing_what_it_says(tmp_path):
    assert with_template(tmp_path, "{{ 9 ** 999999999 }}").chat_template


def test_a_panic_of_the_library_is_an_input_error(tmp_path):
    """Its Rust code panics for a merge whose parts are not in the vocabulary's prefix convention."""
    content = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "continuing_subword_prefix": "#######"}}
    content["model"] |= {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"tokenizer\.json is not a tokenizer: range"):
        load(tmp_path)


# Streams


def streamed(tokenizer, prompt, output, stops=()) -> list[str]:
    stream = tokenizer.stream(prompt, stops)
    pieces = []
    for token_id in output:
        pieces.append(stream.push(token_id))
        if stream.stopped:
            break
    return [*pieces, stream.finish()]


@unhurried
@example(text="éé你🙂\n", cut=10)
@example(text="aaaa\u0301🙂🙂🙂🙂", cut=12)
@given(text=st.text(st.sampled_from("ab 你🙂é\n\u0301"), max_size=30), cut=st.integers(0, 60))
def test_a_stream_gives_the_text_and_no_broken_character(both, text, cut):
    tokenizer, _ = both
    token_ids = tokenizer.encode(text)
    prompt, output = token_ids[:cut], token_ids[cut:]
    pieces = streamed(tokenizer, prompt, output)
    ends = (tokenizer.decode(prompt[: max(len(prompt) - missing, 0)]) for missing in range(4))
    # The prompt may end inside a character, even all its last tokens may.
    before = next((text for text in ends if not text.endswith("\ufffd")), tokenizer.decode(prompt)[:-1])
    assert before + "".join(pieces) == tokenizer.decode(token_ids)
    assert not any("\ufffd" in piece for piece in pieces)


@unhurried
@given(data=st.lists(st.integers(0, 299), max_size=40))
def test_a_stream_of_any_tokens_joins_to_their_decoding(data):
    for tokenizer in (SHIPPED, BYTE_LEVEL):
        assert "".join(streamed(tokenizer, [], data)) == tokenizer.decode(data)


@unhurried
@example(data=["hello"] * 12 + ["</s>", "quick"])
@example(data=["The"] * 5 + ["</s>"] * 20 + ["quick"])
@given(data=st.lists(st.sampled_from(["The", "quick", "</s>"]), min_size=12, max_size=40))
def test_a_word_after_hidden_tokens_keeps_its_space(both, data):
    tokenizer, theirs = both
    words = {word: tokenizer.encode(f"a {word}")[len(tokenizer.encode("a")) :] for word in ("The", "quick", "hello")}
    words["</s>"] = [theirs.eos_token_id]
    token_ids = [token_id for word in data for token_id in words[word]]
    assert "".join(streamed(tokenizer, [], token_ids)) == tokenizer.decode(token_ids)


def test_a_word_after_the_prompt_keeps_its_space(both):
    tokenizer, _ = both
    whole = tokenizer.encode("The quick")
    assert "".join(streamed(tokenizer, tokenizer.encode("The"), whole[len(tokenizer.encode("The")) :])) == " quick"


@unhurried
@given(
    text=st.text(st.sampled_from("ab "), max_size=30),
    stops=st.lists(st.text(st.sampled_from("ab "), min_size=1, max_size=9), min_size=1, max_size=3),
)
def test_stop_strings_end_the_text_before_them(both, text, stops):
    tokenizer, _ = both
    pieces = streamed(tokenizer, [], tokenizer.encode(text), stops)
    found = "".join(pieces)
    assert not any(stop in found for stop in stops)
    whole = tokenizer.decode(tokenizer.encode(text))
    if any(stop in whole for stop in stops):
        assert any(whole.startswith(found + stop) for stop in stops)
    else:
        assert found == whole


def test_what_could_become_a_stop_string_waits():
    assert streamed(SHIPPED, [], b"xENoENDy", ["END"]) == ["x", "", "", "ENo", "", "", "", ""]
    assert streamed(SHIPPED, [], b"xEN", ["END"]) == ["x", "", "", "EN"]


@pytest.mark.parametrize(
    ("stop", "may_stop", "text"), [("EN", True, "x"), ("END!", True, "xEND\ufffd"), ("EN", False, "xEND\ufffd")]
)
def test_a_stop_string_before_half_a_character_ends_the_text(stop, may_stop, text):
    stream = TextStream(lambda token_ids: "xEND\ufffd" * len(token_ids), [], [stop])
    assert stream.push(0, may_stop=may_stop) + stream.finish() == text
    assert stream.stopped == (text == "x")


def test_stop_strings_wait_for_min_tokens():
    stream = SHIPPED.stream([], ["b"])
    assert (stream.push(ord("b"), may_stop=False), stream.stopped) == ("b", False)
    assert (stream.push(ord("b")), stream.stopped) == ("", True)


def test_a_token_reads_as_within_a_text(both):
    tokenizer, theirs = both
    token_ids = tokenizer.encode("The quick brown fox")
    assert "".join(map(tokenizer.token_text, token_ids)).removeprefix("<s>").strip() == "The quick brown fox"
    assert tokenizer.token_text(theirs.eos_token_id) == "</s>"


@unhurried
@given(text=st.text(st.sampled_from("ab 你🙂é\n\u0301"), max_size=30))
def test_the_bytes_of_tokens_together_are_their_text(both, text):
    for tokenizer in (both[0], SHIPPED):
        found = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, special=False)))
        assert found.decode() == " " * (tokenizer.drops_first_space and text != "") + text


def test_a_token_that_is_no_part_of_a_character_has_the_bytes_of_its_text(both):
    tokenizer, theirs = both
    assert tokenizer.token_bytes(theirs.eos_token_id) == b"</s>"
    assert (SHIPPED.token_bytes(0xE6), SHIPPED.token_bytes(257), SHIPPED.token_bytes(280)) == (
        b"\xe6",
        b"<257>",
        b"<280>",
    )
    unknown = HuggingFaceTokenizer(models.WordLevel({"a": 0, "\ufffd": 1}, unk_token="a"))
    assert Tokenizer(FileCodec(unknown, None)).token_bytes(1) == " \ufffd".encode()


def test_a_text_that_the_library_refuses_is_an_input_error():
    broken = HuggingFaceTokenizer(models.WordLevel({"a": 0}, unk_token="<unk>"))  # Which it does not have.
    with pytest.raises(InputError, match="the model's tokenizer does not take this text"):
        Tokenizer(FileCodec(broken, None)).encode("b")
