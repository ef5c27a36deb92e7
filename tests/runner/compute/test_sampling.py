"""sample() draws from the distribution of the parameters, and a row does not depend on the batch."""

import contextlib
import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from exeplan.errors import InputError
from exeplan.runner.compute.tokens.sampling import SMALLEST_TEMPERATURE, SamplingParams, candidates, sample

VOCAB = 50
token_lists = st.lists(st.integers(0, VOCAB - 1), max_size=12)
seeds = st.integers(0, 2**32)
unhurried = settings(deadline=None)


@dataclass
class Row:
    sampling: SamplingParams
    seed: int = 0
    prompt_token_ids: list[int] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    banned_token_ids: tuple[int, ...] = ()

    @property
    def plain(self) -> bool:
        return self.sampling.plain


def random_logits(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


cuts = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.1, 2.0),
        "top_k": st.integers(-1, 60),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.floats(0.0, 0.5),
    }
)
anything = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    min_tokens=st.sampled_from([0, 4]),
    logprobs=st.sampled_from([None, 0, 3]),
    logit_bias=st.sampled_from([{}, {7: 2.5}]),
)
rows_of_all_kinds = st.builds(
    Row, anything, seeds, prompt_token_ids=token_lists, output_token_ids=token_lists, banned_token_ids=st.just((2, 3))
)


# The distribution


@unhurried
@given(seed=seeds, cut=cuts)
def test_candidates_and_their_odds_are_those_of_transformers_warpers(seed, cut):
    logits = random_logits(seed, VOCAB)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(cut["temperature"])])
    if cut["min_p"] > 0:
        warpers.append(MinPLogitsWarper(cut["min_p"]))
    if cut["top_k"] > 0:
        warpers.append(TopKLogitsWarper(cut["top_k"]))
    if cut["top_p"] < 1:
        warpers.append(TopPLogitsWarper(cut["top_p"]))
    expected = warpers(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0].softmax(-1)

    scaled, ids = candidates(logits, SamplingParams(**cut))

    found = torch.zeros(VOCAB).scatter(0, ids, scaled.softmax(-1))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("top_p", [0.5, 0.99])
@pytest.mark.parametrize("spread", [0.1, 4.0], ids=["flat", "peaked"])
def test_top_p_of_a_large_vocabulary_is_that_of_transformers(top_p, spread):
    logits = torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * spread
    expected = TopPLogitsWarper(top_p)(torch.zeros(1, 1, dtype=torch.long), logits[None])[0]
    _, ids = candidates(logits, SamplingParams(top_p=top_p))
    assert abs(len(ids) - int(expected.isfinite().sum())) <= 1  # Sums of many small numbers round differently.


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.02),
        SamplingParams(temperature=1.5, top_k=6, top_p=0.9, min_p=0.05),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params):
    logits, draws = random_logits(5, 8) / 2, 4000
    scaled, ids = candidates(logits, params)
    expected = torch.zeros(8).scatter(0, ids, scaled.softmax(-1)).double().numpy()
    rows = [Row(params, seed=seed) for seed in range(draws)]
    tokens = torch.tensor([token.token_id for token in sample(logits.repeat(draws, 1), rows)])
    counts = torch.bincount(tokens, minlength=8).numpy()
    assert not counts[expected == 0].any()
    possible = expected > 0
    assert chisquare(counts[possible], expected[possible] / expected.sum() * draws).pvalue > 0.01


def test_positions_of_one_request_draw_independently():
    logits, draws = torch.zeros(4), 4000
    rows = [Row(SamplingParams(), seed=9, output_token_ids=[0] * position) for position in range(draws)]
    tokens = torch.tensor([token.token_id for token in sample(logits.repeat(draws, 1), rows)])
    pairs = torch.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16).double().numpy()
    assert chisquare(pairs, [pairs.sum() / 16] * 16).pvalue > 0.01


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3}], ids=str)
@pytest.mark.parametrize("temperature", [1e-12, SMALLEST_TEMPERATURE, 1e-40, 1e-46, 5e-324, 0.0])
def test_a_vanishing_temperature_takes_the_most_likely_token(temperature, cut):
    logits = random_logits(3, 1, VOCAB)
    best = int(logits.argmax())
    assert sample(logits, [Row(SamplingParams(temperature=temperature, **cut))])[0].token_id == best


def test_top_p_of_zero_takes_the_most_likely_token():
    logits = random_logits(3, 1, VOCAB)
    best = int(logits.argmax())
    assert sample(logits, [Row(SamplingParams(top_p=0.0))])[0].token_id == best


# Independence


@unhurried
@given(rows=st.lists(rows_of_all_kinds, min_size=2, max_size=6), seed=seeds)
def test_a_row_gets_the_same_token_alone_and_in_a_batch(rows, seed):
    logits = random_logits(seed, len(rows), VOCAB)
    alone = [sample(logits[i : i + 1].clone(), [row])[0] for i, row in enumerate(rows)]
    assert sample(logits.clone(), rows) == alone


def test_another_seed_gives_another_output():
    logits = torch.zeros(2, 10_000)
    first, second = sample(logits, [Row(SamplingParams(), seed=1), Row(SamplingParams(), seed=2)])
    assert first != second


def test_a_row_that_is_not_a_number_fails_alone():
    logits = random_logits(0, 4, VOCAB)
    logits[1, 7], logits[2, 0], logits[3] = math.nan, math.inf, -math.inf
    expected = int(logits[0].argmax())
    for params in (
        SamplingParams(temperature=0.0),
        SamplingParams(logprobs=1, temperature=0.0),
        SamplingParams(top_k=1),
    ):
        tokens = sample(logits.clone(), [Row(params) for _ in range(4)])
        assert [token and token.token_id for token in tokens] == [expected, None, None, None]


# Penalties and others; `sample` edits the logits in place, where a test can see them


@unhurried
@given(seed=seeds, prompt=token_lists, output=token_lists, penalty=st.floats(0.5, 2.0))
def test_repetition_penalty_is_that_of_transformers(seed, prompt, output, penalty):
    logits = random_logits(seed, 1, VOCAB)
    seen = torch.tensor([prompt + output], dtype=torch.long)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(seen, logits.clone())
    sample(logits, [Row(SamplingParams(temperature=0.0, repetition_penalty=penalty), 0, prompt, output)])
    torch.testing.assert_close(logits, expected)


def test_presence_counts_once_and_frequency_every_time_and_both_only_the_output():
    logits = torch.zeros(1, 4)
    sample(logits, [Row(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), 0, [3], [1, 1, 2])])
    assert logits.tolist() == [[0.0, -1.0, -0.75, 0.0]]


@unhurried
@given(seed=seeds, output=token_lists, min_tokens=st.integers(1, 15))
def test_min_tokens_is_that_of_transformers(seed, output, min_tokens):
    logits = random_logits(seed, 1, VOCAB)
    seen = torch.tensor([output], dtype=torch.long)
    expected = MinNewTokensLengthLogitsProcessor(0, min_tokens, [2, 3], device="cpu")(seen, logits.clone())
    row = Row(SamplingParams(temperature=0.0, min_tokens=min_tokens), 0, [], output, banned_token_ids=(2, 3))
    sample(logits, [row])
    torch.testing.assert_close(logits, expected)


def test_logit_bias_is_added():
    logits = torch.zeros(1, 4)
    (token,) = sample(logits, [Row(SamplingParams(temperature=0.0, logit_bias={2: 1.5, 1: -100}))])
    assert (token.token_id, logits.tolist()) == (2, [[0.0, -100.0, 1.5, 0.0]])


def test_logprobs_are_of_the_raw_distribution():
    logits = random_logits(4, 1, VOCAB)
    expected = logits[0].log_softmax(-1)
    best = expected.topk(3)
    (token,) = sample(logits, [Row(SamplingParams(temperature=2.0, top_k=1, logprobs=3, logit_bias={11: 50}))])
    assert token.token_id == 11
    assert token.logprob == expected[11].item()
    assert token.top_logprobs == tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))


# Checks


@pytest.mark.parametrize(
    ("field_name", "value", "message"),
    [
        ("temperature", -0.1, "temperature must be between 0.0 and 2.0, found -0.1"),
        ("temperature", math.nan, "temperature must be between 0.0 and 2.0, found nan"),
        ("temperature", "hot", "temperature must be a number between 0.0 and 2.0, found 'hot'"),
        ("top_k", 2.0, "top_k must be an integer between -1 and 2147483647, found 2.0"),
        ("top_p", 1.01, "top_p must be between 0.0 and 1.0, found 1.01"),
        ("min_p", True, "min_p must be a number between 0.0 and 1.0, found True"),
        ("repetition_penalty", 0.0, "repetition_penalty must be between 0.01 and 100.0, found 0.0"),
        ("presence_penalty", 3, "presence_penalty must be between -2.0 and 2.0, found 3"),
        ("frequency_penalty", None, "frequency_penalty must be a number between -2.0 and 2.0, found None"),
        ("seed", 2**63, "seed must be between -9223372036854775808 and 9223372036854775807, found 9223372036854775808"),
        pytest.param("seed", 10**5000, "found a number of more than 30 digits", id="seed-long"),
        ("max_tokens", 0, "max_tokens must be between 1 and 2147483647, found 0"),
        ("min_tokens", -1, "min_tokens must be between 0 and 2147483647, found -1"),
        ("logprobs", 21, "logprobs must be between 0 and 20, found 21"),
        ("ignore_eos", 1, "ignore_eos must be true or false, found 1"),
        ("stop", "x", "stop must be a list, found 'x'"),
        ("stop", ["x"] * 17, "stop takes at most 16 entries, found 17"),
        ("stop", [""], "each stop string must have 1 to 1024 characters, found ''"),
        ("stop_token_ids", [-1], "each of stop_token_ids must be between 0 and 2147483647, found -1"),
        ("logit_bias", {1: 101}, "logit_bias of token 1 must be between -100.0 and 100.0, found 101"),
        ("logit_bias", {"1": 1}, "each token id of logit_bias must be an integer between 0 and 2147483647, found '1'"),
    ],
)
def test_a_field_out_of_its_limits_is_named(field_name, value, message):
    with pytest.raises(InputError) as error:
        SamplingParams(**{field_name: value})
    assert str(error.value).endswith(message)


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(InputError, match="min_tokens 5 is above max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


@unhurried
@given(
    value=st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers()))
)
def test_any_value_is_taken_or_refused_with_an_input_error(value):
    for name in SamplingParams.__dataclass_fields__:
        with contextlib.suppress(InputError):
            SamplingParams(**{name: value})
