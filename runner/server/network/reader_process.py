"""Reader: from a request's body to token ids, in a process of its own that may be killed at any moment.

It is forked, answers every ReaderCommand of its socket with one ReaderAnswer, and ends with the socket. Everything that
a client's bytes, a checkpoint's template or its tokenizer can make slow happens here: parsing, checks, the template,
tokenization. The kernel ends a process that takes too long over one command, also when the front end is gone;
`readers.py` ends it sooner, and has another one forked.
Not here: whether the request is admitted (`service.py`), and what the engine checks besides.
"""

import resource
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

from exeplan.core.models.model import model_spec
from exeplan.errors import InputError
from exeplan.runner import logs
from exeplan.runner.compute.tokens.sampling import SamplingParams, check_token_ids
from exeplan.runner.compute.tokens.structures import check_grammar
from exeplan.runner.engine.admit_request import check_prompt_length
from exeplan.runner.engine.chat_template import UNKNOWN_TOOL_FORMAT
from exeplan.runner.engine.tokenizer import Tokenizer, structure_tokenizer
from exeplan.runner.ipc.frames import MessageError, frame
from exeplan.runner.ipc.messages import (
    READER_COMMANDS,
    BodyRefused,
    Generate,
    ReadDetokenize,
    ReaderAnswer,
    ReaderCommand,
    ReaderReady,
    ReaderSetup,
    ReadGeneration,
    ReadTokenize,
    Sampling,
    TextRead,
    TokensRead,
    ToolFormat,
)
from exeplan.runner.server.openai.chat_request import ChatRequest, Message, Tool, ToolChosen
from exeplan.runner.server.openai.check import check
from exeplan.runner.server.openai.completion_request import CompletionRequest
from exeplan.runner.server.openai.errors import RequestError, unknown_model
from exeplan.runner.server.openai.generation_request import MAX_PROMPT_LOGPROBS, GenerationRequest, parse
from exeplan.runner.server.openai.json_body import read_object
from exeplan.runner.server.openai.structure import grammar_of, refused, tool_grammar
from exeplan.runner.server.openai.tokenize_request import DetokenizeRequest, TokenizeRequest
from exeplan.runner.server.openai.tool_arguments import declared_types
from exeplan.runner.server.openai.tool_calls import DIALECTS

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_MEMORY_BYTES = 4 << 30
"""A template that makes an endless text is refused at this size, where its time is not over before."""
LAST_SECONDS = 10
"""After which the kernel ends the process; above `readers.READ_SECONDS`."""


class Reader:
    """The reader of one model's requests."""

    def __init__(self, setup: ReaderSetup) -> None:
        """Raises InputError where the tokenizer cannot be loaded."""
        source = setup.model
        directory = None if source.directory is None else Path(source.directory)
        self._spec = model_spec(source.config, name=source.name, directory=directory)
        self._served, self._tokenizer = setup.served_name, Tokenizer.load(self._spec)
        self._sampling_defaults = setup.sampling_defaults
        self._vocabulary: LLTokenizer | None = None
        """Made for the first request with a grammar."""

    def take(self, command: ReaderCommand) -> ReaderAnswer:
        """Carries a command out. Raises InputError for a body that is refused."""
        match command:
            case ReadGeneration():
                return self._generation(command)
            case ReadTokenize():
                return self._tokenize(command)
            case ReadDetokenize():
                return self._detokenize(command)
            case ReaderSetup():
                raise MessageError("the first command, and no other, must be ReaderSetup")
            case _:
                assert_never(command)

    def _generation(self, command: ReadGeneration) -> Generate:
        kind = ChatRequest if command.chat else CompletionRequest
        request, params = parse(kind, command.body, self._sampling_defaults)
        self._check_model(request.model)
        prompts = self._prompts(request, command.max_tokens)
        for prompt in prompts:
            check_prompt_length(self._spec, len(prompt))
            check_token_ids("the prompt", prompt, self._spec.vocab_size)
        check_token_ids("stop_token_ids", params.stop_token_ids, self._spec.vocab_size)
        grammar, tools, shown = self._structured(request)
        echoes = self._echoes(request, prompts)
        self._check_reported(request, params.prompt_logprobs, prompts)
        options = request.stream_options
        wants_usage = options is not None and options.include_usage
        return Generate(
            chat=command.chat,
            prompts=prompts,
            echoes=echoes,
            sampling=Sampling(**asdict(_with_structure(params, grammar, shown))),
            n=request.n,
            stream=request.stream,
            usage=wants_usage,
            usage_in_each_chunk=wants_usage and options is not None and options.continuous_usage_stats,
            prompt_logprobs=request.prompt_logprobs,
            scores_only=request.scores_only,
            deadline=request.deadline,
            weight=request.weight,
            tools=tools,
            limit_is_default=request.limit_is_default,
            return_token_ids=request.return_token_ids,
            return_tokens_as_token_ids=request.return_tokens_as_token_ids,
        )

    def _structured(self, request: GenerationRequest) -> tuple[str | None, ToolFormat | None, tuple[int, ...]]:
        """The grammar that the output must have, how calls of functions are found in it, and the special tokens that
        its text has for that."""
        if structure := request.structure:
            # Outputs of other models continue their prompts.
            begins = self._spec.is_encoder_decoder
            stated = grammar_of(structure, space_first=begins and self._tokenizer.drops_first_space)
            return self._checked(stated, structure.param), None, ()
        template = self._tokenizer.chat_template
        if not isinstance(request, ChatRequest):
            return None, None, ()
        if not (functions := request.told_functions) and not (template and template.has_channels):
            return None, None, ()
        forced = request.forced_functions
        name = self._tool_format(forced=bool(forced))
        tools = ToolFormat(
            name=name,
            functions=tuple(function.name for function in functions),
            single=not request.parallel_tool_calls or isinstance(request.tool_choice, ToolChosen),
            types={f.name: declared_types(f.parameters) for f in functions} if DIALECTS[name].tags else {},
        )
        special = self._tokenizer.special_token_ids(DIALECTS[name].markers)
        grammar = self._checked(tool_grammar(forced, tools, special), "tools") if forced else None
        return grammar, tools, tuple(special.values())

    def _tool_format(self, *, forced: bool) -> str:
        template = self._tokenizer.chat_template
        found = template.tool_format if template else None
        if not found and not forced:
            raise RequestError(UNKNOWN_TOOL_FORMAT, param="tool_choice")
        return found if found and not (forced and DIALECTS[found].forced is None) else "json"

    def _checked(self, grammar: str, param: str) -> str:
        try:
            if self._vocabulary is None:
                self._vocabulary = structure_tokenizer(self._spec, self._tokenizer)
            check_grammar(self._vocabulary, grammar)
        except InputError as error:
            raise refused(error, param) from None
        return grammar

    def _prompts(self, request: GenerationRequest, max_tokens: int) -> list[list[int]]:
        if isinstance(request, ChatRequest):
            tools = [tool for tool in request.tools if tool.function in request.told_functions]
            template = self._tokenizer.chat_template
            variables = request.template_variables(template.variables if template else ())
            return [self._conversation(request.messages, variables, max_tokens, tools=tools)]
        assert isinstance(request, CompletionRequest)
        return [
            prompt if isinstance(prompt, list) else self._text(prompt, max_tokens, special=True)
            for prompt in request.prompts
        ]

    def _text(self, text: str, max_tokens: int, *, special: bool) -> list[int]:
        self._tokenizer.check_length(text, max_tokens)
        return self._tokenizer.encode(text, special=special)

    def _conversation(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        max_tokens: int,
        *,
        tools: Sequence[Tool],
        special: bool = False,
    ) -> list[int]:
        template = self._tokenizer.chat_template
        if template and not template.takes_tools and (tools or any(message.is_about_tools for message in messages)):
            raise RequestError("this model's chat template has no place for tools, so it takes none", param="tools")
        plain = [message.plain() for message in messages]
        self._tokenizer.check_length("".join(message["content"] for message in plain), max_tokens)
        told = [tool.model_dump(exclude_none=True) for tool in tools]
        return self._tokenizer.encode_chat(plain, variables, tools=told, special=special)

    def _echoes(self, request: GenerationRequest, prompts: Sequence[list[int]]) -> list[str]:
        if not isinstance(request, CompletionRequest) or not request.echo:
            return []
        if self._spec.is_encoder_decoder:
            raise RequestError("an encoder-decoder model's output does not continue its prompt", param="echo")
        given = zip(request.prompts, prompts, strict=True)
        return [prompt if isinstance(prompt, str) else self._tokenizer.decode(ids) for prompt, ids in given]

    def _check_reported(self, request: GenerationRequest, count: int | None, prompts: Sequence[list[int]]) -> None:
        """Raises RequestError where log-probabilities of prompts are not to be had, or are too many for one answer."""
        if count is None:
            return
        param = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        if self._spec.is_encoder_decoder:
            raise RequestError("an encoder-decoder model gives its prompt no log-probabilities", param=param)
        wanted = request.n * sum(map(len, prompts)) * (1 + count)
        if wanted > MAX_PROMPT_LOGPROBS:
            message = (
                f"the tokens of the prompts have {wanted} log-probabilities, those of the most likely tokens included; "
                f"an answer has at most {MAX_PROMPT_LOGPROBS}: send fewer prompts in a request, or lower {param}"
            )
            raise RequestError(message, param=param)

    def _tokenize(self, command: ReadTokenize) -> TokensRead:
        request = check(TokenizeRequest, read_object(command.body))
        request.check_together()
        self._check_model(request.model)
        special, most = request.add_special_tokens, command.max_tokens
        if request.prompt is not None:
            token_ids = self._text(request.prompt, most, special=special is not False)
        else:
            messages = request.messages or []
            variables, special = request.chat_template_kwargs, bool(special)
            token_ids = self._conversation(messages, variables, most, tools=request.tools, special=special)
        texts = [self._tokenizer.token_text(token) for token in token_ids] if request.return_token_strs else None
        return TokensRead(token_ids=token_ids, texts=texts)

    def _detokenize(self, command: ReadDetokenize) -> TextRead:
        request = check(DetokenizeRequest, read_object(command.body))
        self._check_model(request.model)
        if self._tokenizer.codec is None:
            raise RequestError("this model has no tokenizer")
        check_token_ids("tokens", request.tokens, self._spec.vocab_size)
        return TextRead(text=self._tokenizer.decode(request.tokens, special=True))

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._served):
            raise unknown_model(name, self._served)


def _with_structure(params: SamplingParams, grammar: str | None, shown: tuple[int, ...]) -> SamplingParams:
    """Raises RequestError where the other parameters do not go with a grammar."""
    try:
        return replace(params, structure=grammar, shown_token_ids=shown)
    except InputError as error:
        raise RequestError(str(error)) from None


def main(connection: socket.socket) -> int:
    """Answers until the connection is closed. Returns 1 where what came was no ReaderCommand."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    logs.configure_child()
    reader: Reader | None = None
    try:
        while (command := READER_COMMANDS.read(connection.recv)) is not None:
            if reader is None:
                reader = _started(command)
                connection.sendall(frame(ReaderReady()))
                continue
            signal.setitimer(signal.ITIMER_REAL, LAST_SECONDS)
            answer = frame(_answer(reader, command))
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.sendall(answer)
    except (InputError, ConnectionError) as error:
        print(f"exeplan.server: {error}", file=sys.stderr)
        return 1
    return 0


def _started(command: ReaderCommand) -> Reader:
    if not isinstance(command, ReaderSetup):
        raise MessageError(f"the first command must be ReaderSetup, found {type(command).__name__}")
    return Reader(command)


def _answer(reader: Reader, command: ReaderCommand) -> ReaderAnswer:
    try:
        return reader.take(command)
    except RequestError as error:
        return BodyRefused(message=str(error), status=error.status, param=error.param, code=error.code)
    except InputError as error:
        return BodyRefused(message=str(error), status=400, param=None, code=None)
    except MemoryError:
        return BodyRefused(message="the request takes too much memory to read", status=400, param=None, code=None)
