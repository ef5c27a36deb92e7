"""Admission of a request to an engine: it is checked, and becomes the state that the engine keeps of it.

Nothing else changes meanwhile, so that a defect, or memory that is lacking, is the end of this request alone.
"""

import secrets
from collections.abc import Sequence

from exeplan.core.models.model import ModelSpec
from exeplan.errors import InputError
from exeplan.runner.compute.tokens.sampling import check_token_ids
from exeplan.runner.engine.requests import Request, RequestState
from exeplan.runner.engine.text_stream import TextStream
from exeplan.runner.engine.tokenizer import Tokenizer, decoder_start_token_id


class AdmissionError(Exception):
    """A request could not be admitted for a reason that it does not state; the engine is as it was."""


def admit_request(
    request: Request, *, spec: ModelSpec, tokenizer: Tokenizer, eos_token_ids: Sequence[int], most_tokens: int
) -> RequestState:
    """The state of a request in an engine whose requests have at most `most_tokens`, output included. Raises InputError
    for one that cannot run, and AdmissionError where that could not be found out."""
    try:
        return _admitted(request, spec, tokenizer, eos_token_ids, most_tokens)
    except InputError:
        raise
    except BaseException as error:  # A panic of the tokenizers library is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        message = f"the engine could not take this request ({type(error).__name__}); the server's log says more"
        raise AdmissionError(message) from error


def _admitted(
    request: Request, spec: ModelSpec, tokenizer: Tokenizer, eos_token_ids: Sequence[int], most_tokens: int
) -> RequestState:
    params, num_prompt_tokens = request.sampling, len(request.prompt_token_ids)
    check_prompt_length(spec, num_prompt_tokens)
    if params.prompt_logprobs is not None and spec.is_encoder_decoder:
        raise InputError("an encoder-decoder model gives its prompt no log-probabilities; leave out prompt_logprobs")
    prompt = list(request.prompt_token_ids)
    check_token_ids("the prompt", prompt, spec.vocab_size)
    check_token_ids("stop_token_ids", params.stop_token_ids, spec.vocab_size)
    check_token_ids("logit_bias", list(params.logit_bias), spec.vocab_size)
    begin = [] if spec.first_token_from_prefill else [decoder_start_token_id(spec)]
    max_output_tokens = _max_output_tokens(spec, num_prompt_tokens, params.max_tokens, most_tokens)
    if params.min_tokens > max_output_tokens:
        raise InputError(f"min_tokens {params.min_tokens} is more than the {max_output_tokens} tokens that fit")
    ends = (*params.stop_token_ids, *eos_token_ids)
    output = list(request.output_token_ids)
    return RequestState(
        request_id=request.request_id,
        num_prompt_tokens=len(prompt) + len(begin),
        num_output_tokens=len(output),
        preemptions=int(request.start is not None),  # By the end of the engine before.
        max_output_tokens=max_output_tokens,
        sampling=params,
        plain=params.plain,
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        prompt_token_ids=begin or prompt,
        token_ids=[*prompt, *begin, *output],
        num_begin_tokens=len(begin),
        banned_token_ids=tuple(token for token in ends if 0 <= token < spec.vocab_size),
        end_token_ids=frozenset(params.stop_token_ids if params.ignore_eos else ends),
        stream=_advanced(
            tokenizer.stream(begin or prompt, params.stop, shown=params.shown_token_ids), output, params.min_tokens
        ),
        arrival=request.arrival,
        start=request.start,
        crashes=request.crashes,
        deadline=request.deadline,
        may_begin_late=request.may_begin_late,
        weight=request.weight,
        client=request.client,
        client_weight=request.client_weight,
    )


def _advanced(stream: TextStream | None, output: Sequence[int], min_tokens: int) -> TextStream | None:
    """The stream after these tokens, whose text has been delivered."""
    if stream:
        for number, token_id in enumerate(output, start=1):
            stream.push(token_id, may_stop=number >= min_tokens)
    return stream


def check_prompt_length(spec: ModelSpec, num_prompt_tokens: int) -> None:
    """Raises InputError for a prompt that the context has no room for; a server asks before it copies the prompt."""
    context = spec.max_context
    if num_prompt_tokens == 0:
        raise InputError("the prompt is empty; it needs at least one token")
    most = context - 1 if spec.first_token_from_prefill else context
    if num_prompt_tokens > most:
        raise InputError(f"the prompt has {num_prompt_tokens} tokens; the context of {context} takes at most {most}")


def _max_output_tokens(spec: ModelSpec, num_prompt_tokens: int, max_tokens: int | None, most_tokens: int) -> int:
    """For a prompt that fits."""
    if max_tokens is None:
        return num_fitting(spec, num_prompt_tokens, most_tokens)
    if max_tokens > (rest := _rest_of_context(spec, num_prompt_tokens)):
        raise InputError(
            f"max_tokens {max_tokens} after a prompt of {num_prompt_tokens} tokens exceeds the context "
            f"of {spec.max_context}; at most {rest} fit"
        )
    return max_tokens


def num_fitting(spec: ModelSpec, num_prompt_tokens: int, most_tokens: int) -> int:
    """The most output tokens after a prompt that fits, in an engine whose requests have at most `most_tokens`."""
    num_begin_tokens = 0 if spec.first_token_from_prefill else 1
    rest = most_tokens - num_prompt_tokens - num_begin_tokens
    return max(min(_rest_of_context(spec, num_prompt_tokens), rest), 1)


def _rest_of_context(spec: ModelSpec, num_prompt_tokens: int) -> int:
    return spec.max_context - num_prompt_tokens if spec.first_token_from_prefill else spec.max_context
