"""Tokenizer: text to token ids and back, as the files of a model directory define it; runs no code of the checkpoint.

It is read from tokenizer.json, or from vocab.json and merges.txt where they are of GPT-2's tokenizer (GPT-2, OPT). A
shipped model has neither and works on bytes. A model without a tokenizer still serves prompts of token ids.
Not here: SentencePiece's tokenizer.model; transformers writes a tokenizer.json for it when it saves the tokenizer.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as HuggingFaceTokenizer

from exeplan.core.models.generation_config import generation_config
from exeplan.core.models.model import ModelSpec
from exeplan.errors import InputError, shown
from exeplan.files import read_json, read_text
from exeplan.runner.engine.chat_template import ChatTemplate, find_chat_templates
from exeplan.runner.engine.text_stream import BROKEN, TextStream

if TYPE_CHECKING:
    from llguidance import LLTokenizer

T = TypeVar("T")
_PLAIN_CHAT = (
    '{% if tools %}tools: {{ tools | tojson }}\nA call is <tool_call>{"name": ..., "arguments": {...}}</tool_call>\n'
    "{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}assistant:"
)
"""Of shipped models, which have no weights: for trying the server."""
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
NO_TOKENIZER = "this model has no tokenizer (tokenizer.json, or vocab.json and merges.txt)"
_NO_TOKENS: Mapping[str, str] = MappingProxyType({})
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
"""A byte of a character that a vocabulary of SentencePiece lacks."""


def _byte_of() -> dict[str, int]:
    """Byte-level BPE writes each byte as a character: the visible ones of Latin-1 as themselves, the others, in their
    order, as those from U+0100 on (GPT-2)."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_of()


class Codec(Protocol):
    """Turns text into token ids and back."""

    eos_token_ids: tuple[int, ...]

    @property
    def longest_token(self) -> int:
        """The largest number of characters of one token."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """`special` adds the model's special tokens, such as a beginning-of-sequence token."""

    def decode(self, token_ids: Sequence[int], *, skip_special: bool) -> str: ...

    def token_bytes(self, token_id: int) -> bytes | None:
        """What a token that stands for bytes adds to a text; None for one that stands for characters."""

    @property
    def special_token_ids(self) -> Mapping[str, int]:
        """The tokens that `skip_special` leaves out, by name."""

    @property
    def drops_first_space(self) -> bool:
        """Whether a text does not have the space of its first token."""

    def for_structures(self, vocab_size: int, ends: list[int]) -> "LLTokenizer":
        """The bytes of `vocab_size` tokens, as llguidance wants them; `ends` end a sequence."""


class Tokenizer:
    """The tokenizer of a model; `codec` is None where it has none.

    `special_tokens` are the texts of tokens such as `bos_token`, by these names.
    """

    def __init__(
        self,
        codec: Codec | None,
        chat_template: ChatTemplate | None = None,
        special_tokens: Mapping[str, str] = _NO_TOKENS,
    ) -> None:
        self.codec, self.chat_template, self.special_tokens = codec, chat_template, special_tokens

    @classmethod
    def load(cls, spec: ModelSpec) -> "Tokenizer":
        """The tokenizer in the model's directory. Raises InputError naming a file that cannot be read."""
        if spec.directory is None:
            return cls(ByteCodec(), ChatTemplate(_PLAIN_CHAT)) if spec.vocab_size >= ByteCodec.num_ids else cls(None)
        config = _read_optional(spec.directory / "tokenizer_config.json")
        named = {**_read_optional(spec.directory / "special_tokens_map.json"), **config}
        tokens = {name: token for name in _SPECIAL_NAMES if (token := _token(named.get(name)))}
        sources = find_chat_templates(spec.directory, config)
        template = ChatTemplate(sources.source, tokens, tool_source=sources.tool_source) if sources else None
        return cls(_read_codec(spec.directory, config, tokens), template, tokens)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end-of-sequence token, for a model whose config names none."""
        return self.codec.eos_token_ids if self.codec else ()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """A completion's prompt, with the model's special tokens.

        Raises InputError when there is no tokenizer, or the text is not Unicode.
        """
        return self._encode(text, special=special)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        special: bool = False,
    ) -> list[int]:
        """A conversation as the chat template renders it, with `variables` of its own, and `tools` that may be called.

        Raises InputError where there is no template, or it does not take them.
        """
        if self.chat_template is None:
            raise InputError("this model has no chat template, so it takes completions only")
        return self._encode(self.chat_template.render(messages, variables, tools=tools), special=special)

    def check_length(self, text: str, max_tokens: int) -> None:
        """Raises InputError for a text that is too long for any tokenization; does not tokenize."""
        if self.codec and len(text) > self.codec.longest_token * max_tokens:
            raise InputError(f"the prompt has {len(text)} characters, which is more than {max_tokens} tokens can hold")

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Text, without special tokens unless `special`; empty when there is no tokenizer."""
        return self.codec.decode(token_ids, skip_special=not special) if self.codec else ""

    def token_text(self, token_id: int) -> str:
        """One token as within a text: with its leading space, special tokens by name."""
        if self.codec is None:
            return ""
        once, twice = (self.codec.decode([token_id] * count, skip_special=False) for count in (1, 2))
        return twice[len(once) :]

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 of `token_text`; of a token with a part of a character the bytes that it really has."""
        text = self.token_text(token_id)
        found = self.codec.token_bytes(token_id) if self.codec and BROKEN in text else None
        return text.encode() if found is None else found

    def stream(
        self, prompt_token_ids: Sequence[int], stops: Sequence[str] = (), *, shown: Sequence[int] = ()
    ) -> TextStream | None:
        """Incremental detokenization of an output after this prompt; None when there is no tokenizer.

        The names of the special tokens `shown` are in the text.
        Raises InputError when there are stop strings and no tokenizer to find them with.
        """
        if self.codec is None:
            if stops:
                raise InputError("stop strings need a tokenizer, which this model lacks; use stop_token_ids")
            return None
        decode = partial(self._decode_but, frozenset(self.codec.special_token_ids.values()) - {*shown})
        return TextStream(decode if shown else self.decode, prompt_token_ids, stops)

    def _decode_but(self, hidden: Set[int], token_ids: Sequence[int]) -> str:
        assert self.codec
        return self.codec.decode([token for token in token_ids if token not in hidden], skip_special=False)

    @property
    def drops_first_space(self) -> bool:
        """Whether a text does not have the space of its first token."""
        return self.codec is not None and self.codec.drops_first_space

    def special_token_ids(self, names: Iterable[str]) -> dict[str, int]:
        """Of these names, those that are special tokens."""
        known = self.codec.special_token_ids if self.codec else {}
        return {name: known[name] for name in names if name in known}

    def _encode(self, text: str, *, special: bool) -> list[int]:
        if self.codec is None:
            raise InputError(f"{NO_TOKENIZER}; give the prompt as token ids")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"character {error.start} of the prompt is half of a surrogate pair, not Unicode"
            ) from None
        return self.codec.encode(text, special=special)


class ByteCodec:
    """Ids 0 to 255 are bytes, 256 begins and 257 ends a sequence. Further ids are shown as their number."""

    bos_token_id, eos_token_id, num_ids = 256, 257, 258
    eos_token_ids: tuple[int, ...] = (eos_token_id,)
    drops_first_space = False

    @property
    def longest_token(self) -> int:
        return 1

    @property
    def special_token_ids(self) -> Mapping[str, int]:
        return {"<bos>": self.bos_token_id, "<eos>": self.eos_token_id}

    def encode(self, text: str, *, special: bool) -> list[int]:
        return [self.bos_token_id] * special + list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        hidden = (self.bos_token_id, self.eos_token_id) if skip_special else ()
        return b"".join(self.token_bytes(i) for i in token_ids if i not in hidden).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<%d>" % token_id

    def for_structures(self, vocab_size: int, ends: list[int]) -> "LLTokenizer":
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_ByteVocabulary(vocab_size, ends)), vocab_size, ends)


class _ByteVocabulary:
    """What llguidance asks of a tokenizer: only bytes are text."""

    def __init__(self, size: int, ends: list[int]) -> None:
        self.bos_token_id, self.eos_token_id = ByteCodec.bos_token_id, ends[0]
        self.tokens = [ByteCodec().token_bytes(i) for i in range(size)]
        self.special_token_ids = sorted({*range(256, size), *ends})

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


class FileCodec:
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, eos_token: str | None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer, self._steps = tokenizer, _decoder_steps(tokenizer)
        eos_token_id = tokenizer.token_to_id(eos_token) if eos_token else None
        self.eos_token_ids: tuple[int, ...] = () if eos_token_id is None else (eos_token_id,)

    @cached_property
    def longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    @cached_property
    def special_token_ids(self) -> Mapping[str, int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    def encode(self, text: str, *, special: bool) -> list[int]:
        return _called(  # It fails, for example, without a token for the unknown.
            lambda: self._tokenizer.encode(text, add_special_tokens=special).ids,
            "the model's tokenizer does not take this text",
        )

    def decode(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special)

    def token_bytes(self, token_id: int) -> bytes | None:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return None
        kinds = {step["type"] for step in self._steps}
        if "ByteFallback" in kinds and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        if "ByteLevel" in kinds and all(char in _BYTE_OF for char in token):
            return bytes(_BYTE_OF[char] for char in token)
        return None

    def for_structures(self, vocab_size: int, ends: list[int]) -> "LLTokenizer":
        from llguidance import LLTokenizer

        text = self._tokenizer.to_str()
        if any(step["type"] == "Metaspace" for step in self._steps):  # Which llguidance knows by other words.
            plain = [_spaces(step["replacement"]) if step["type"] == "Metaspace" else step for step in self._steps]
            decoder = {"type": "Sequence", "decoders": [*plain, {"type": "ByteFallback"}, {"type": "Fuse"}]}
            text = json.dumps({**json.loads(text), "decoder": decoder})
        return LLTokenizer(text, vocab_size, ends)

    @property
    def drops_first_space(self) -> bool:
        return any(
            (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
            or (step["type"] == "Strip" and step["start"] > 0)
            for step in self._steps
        )


def _decoder_steps(tokenizer: HuggingFaceTokenizer) -> list[dict[str, Any]]:
    """What its decoder does to tokens, one thing after the other, as in tokenizer.json."""
    if tokenizer.decoder is None:
        return []
    found = json.loads(tokenizer.decoder.__getstate__())
    steps: list[dict[str, Any]] = found.get("decoders", [found])
    return steps


def _spaces(replacement: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": replacement}, "content": " "}


def eos_token_ids(spec: ModelSpec) -> tuple[int, ...]:
    """The tokens that end an output, by generation_config.json, else by the model's config; none where neither says."""
    for config in (generation_config(spec), spec.config):
        found = config.get("eos_token_id")
        token_ids: list[Any] = found if isinstance(found, list) else [found]
        if token_ids and all(isinstance(token_id, int) for token_id in token_ids):
            # One beyond the vocabulary is never sampled, and has no logit to be banned by.
            return tuple(token_id for token_id in token_ids if 0 <= token_id < spec.vocab_size)
    return ()


def structure_tokenizer(spec: ModelSpec, tokenizer: Tokenizer | None = None) -> "LLTokenizer":
    """The model's vocabulary as llguidance wants it; by default of the tokenizer in the model's directory.

    Raises InputError for a model without a tokenizer, without an end-of-sequence token, or with a tokenizer whose
    tokens are not pieces of text.
    """
    tokenizer = tokenizer or Tokenizer.load(spec)
    ends = [token for token in eos_token_ids(spec) or tokenizer.eos_token_ids if 0 <= token < spec.vocab_size]
    if tokenizer.codec is None or not ends:
        lacking = "a tokenizer" if tokenizer.codec is None else "an end-of-sequence token"
        raise InputError(f"structured output needs {lacking}, which this model lacks")
    try:
        return tokenizer.codec.for_structures(spec.vocab_size, ends)
    except BaseException as error:  # llguidance raises bare Exception, and a panic of Rust is none.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = str(error).partition("\n")[0][:200]
        raise InputError(f"structured output does not work with this model's tokenizer: {reason}") from None


def _read_codec(directory: Path, config: Mapping[str, Any], tokens: Mapping[str, str]) -> Codec | None:
    if (path := directory / "tokenizer.json").is_file():
        tokenizer = _parse(path)
    elif (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
        tokenizer = _byte_level_bpe(directory, config, tokens)
    else:
        return None
    return FileCodec(tokenizer, tokens.get("eos_token"))


def _called(call: Callable[[], T], message: str) -> T:
    """The result of the tokenizers library, which raises bare Exception, and BaseException where its Rust code panics.

    Raises InputError with the message and the reason.
    """
    try:
        return call()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise InputError(f"{message}: {error}") from None


def _parse(path: Path) -> HuggingFaceTokenizer:
    text = read_text(path)
    return _called(lambda: HuggingFaceTokenizer.from_str(text), f"{path} is not a tokenizer")


def _byte_level_bpe(directory: Path, config: Mapping[str, Any], tokens: Mapping[str, str]) -> HuggingFaceTokenizer:
    """GPT-2's tokenizer from its two files, with the tokens that other files add.

    Raises InputError for one that splits texts by other rules, which these files do not say.
    """
    kind = config.get("tokenizer_class")
    if kind is not None and not str(kind).startswith("GPT2"):
        raise InputError(
            f"{directory}/vocab.json and merges.txt do not say how {shown(kind)} splits a text; write a tokenizer.json "
            "with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    files = str(directory / "vocab.json"), str(directory / "merges.txt")
    model = _called(lambda: models.BPE.from_file(*files), f"{directory}/vocab.json and merges.txt are not a tokenizer")
    tokenizer = HuggingFaceTokenizer(model)
    prefix_space = bool(config.get("add_prefix_space", False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    added = _read_optional(directory / "added_tokens.json")
    if not all(isinstance(token_id, int) for token_id in added.values()):
        raise InputError(f"{directory}/added_tokens.json must map tokens to integers")
    names = [*sorted(added, key=lambda name: added[name]), *tokens.values(), "<|endoftext|>"]
    known = [name for name in dict.fromkeys(names) if name in added or tokenizer.token_to_id(name) is not None]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in known])
    bos_token = tokens.get("bos_token")
    if config.get("add_bos_token") and bos_token and (bos_id := tokenizer.token_to_id(bos_token)) is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos_token} $A", special_tokens=[(bos_token, bos_id)]
        )
    return tokenizer


def decoder_start_token_id(spec: ModelSpec) -> int:
    """The start token of an encoder-decoder model's decoder. Raises InputError where the config has none."""
    for name in ("decoder_start_token_id", "pad_token_id"):
        if isinstance(token_id := spec.config.get(name), int):
            return token_id
    raise InputError(f"{spec.name}: config.json has no decoder_start_token_id")


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token(value: Any) -> str | None:
    """A token as a config writes it: a string, or a mapping with its `content`."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) and content else None
