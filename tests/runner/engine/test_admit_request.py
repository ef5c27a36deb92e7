"""A request becomes the state of a sequence, or is refused before anything of its prompt is copied."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from exeplan.core.batch import SequenceState
from exeplan.core.models.model import load_model_spec, model_spec
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine.admit_request import AdmissionError, admit_request, num_fitting
from exeplan.runner.engine.requests import Request, RequestState
from exeplan.runner.engine.tokenizer import Tokenizer
from exeplan.scheduling.scheduler import Scheduler

SIZES = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
SPEC = model_spec(
    {**SIZES, "num_attention_heads": 1, "vocab_size": 10, "max_position_embeddings": 16, "rms_norm_eps": 1e-5},
    name="tiny",
)
PLAIN = Tokenizer(None)


def admit(
    prompt: Sequence[int], eos: Sequence[int] = (), *, tokenizer: Tokenizer = PLAIN, **sampling: Any
) -> RequestState:
    request = Request(request_id="1", prompt_token_ids=prompt, sampling=SamplingParams(**sampling))
    return admit_request(request, spec=SPEC, tokenizer=tokenizer, eos_token_ids=eos, most_tokens=64)


class Uncopied(list[int]):
    """A prompt of which only the length may be asked."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the prompt is read")


def test_a_prompt_that_does_not_fit_is_refused_unread() -> None:
    with pytest.raises(InputError, match="has 16 tokens; the context of 16 takes at most 15"):
        admit(Uncopied([1] * 16))


class Defect(Tokenizer):
    """A tokenizer whose streams fail."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__(None)
        self._error = error

    def stream(self, *given: object, shown: object = ()) -> None:
        raise self._error("at once")


class PanicException(BaseException):
    """As Rust code raises it."""


@pytest.mark.parametrize("error", [MemoryError, RuntimeError, PanicException])
def test_a_defect_is_told_from_a_wrong_request(error: type[BaseException]) -> None:
    with pytest.raises(AdmissionError, match=rf"could not take this request \({error.__name__}\)"):
        admit([1], tokenizer=Defect(error))
    with pytest.raises(KeyboardInterrupt):
        admit([1], tokenizer=Defect(KeyboardInterrupt))


def test_an_end_token_outside_the_vocabulary_cannot_come_and_is_not_banned() -> None:
    state = admit([1], eos=(3, 10, 2**70), min_tokens=2, max_tokens=4, stop_token_ids=(5,))
    assert state.banned_token_ids == (5, 3)


@pytest.mark.parametrize("seed", [None, 7, 2**63 - 1])
def test_each_choice_has_a_seed_of_its_own(seed: int | None) -> None:
    seeds = [SamplingParams(seed=seed).with_choice(number).seed for number in range(3)]
    wrapped = {None: [None] * 3, 7: [7, 8, 9], 2**63 - 1: [2**63 - 1, -(2**63), 1 - 2**63]}
    assert seeds == wrapped[seed]


@pytest.mark.parametrize("model", ["demo", "t5-11b"])
@pytest.mark.parametrize("most_tokens", [48, 64])
def test_the_default_limit_fits_with_the_prompt_and_what_the_decoder_begins_with(model: str, most_tokens: int) -> None:
    spec = load_model_spec(model)
    num_prompt_tokens = 10 if spec.first_token_from_prefill else 11
    longest = SequenceState(
        request_id="1", num_prompt_tokens=num_prompt_tokens, max_output_tokens=num_fitting(spec, 10, most_tokens)
    )
    assert longest.num_prompt_tokens + longest.max_output_tokens == most_tokens
    Scheduler(Schedule("orca", {"max_num_seqs": 2}), 4, pass_tokens=most_tokens).check(longest)
