"""Tokens sampled on the device are those of the CPU's sampler."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.kernels.most_likely import most_likely, most_likely_reference
from exeplan.kernels.sampling import draw, draw_reference
from exeplan.kernels.tuning import Config
from exeplan.runner.compute.tokens.noise import log_exponential_noise, noise_key
from exeplan.runner.compute.tokens.sampling import SamplingParams, candidates

from .conftest import DEVICE, needs_triton

VOCAB = 150
SMALL = Config(columns=64)


def parameters(rows, keys):
    """The arguments of `draw`: each row's parameters and the key of its noise."""

    def column(values, dtype=torch.float32):
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    return (
        column([params.temperature for params in rows]),
        column([max(params.top_k, 0) for params in rows], torch.int32),
        column([1 - params.top_p for params in rows]),
        column([math.log(params.min_p) if params.min_p else -math.inf for params in rows]),
        column([key - (1 << 64) if key >> 63 else key for key in keys], torch.int64),
    )


def cpu_token(logits_V, params, key):
    if not params.temperature:
        return int(logits_V.argmax())
    scaled_K, ids_K = candidates(logits_V, params)
    return int(ids_K[(scaled_K - log_exponential_noise(key, ids_K)).argmax()])


def check(logits_RV, rows, keys, config=SMALL):
    columns = parameters(rows, keys)
    expected = [cpu_token(*row) for row in zip(logits_RV, rows, keys, strict=True)]
    for drawn in (draw(logits_RV.to(DEVICE), *columns, config=config), draw_reference(logits_RV.to(DEVICE), *columns)):
        assert drawn[0].tolist() == expected
        assert drawn[1].all()


cuts = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-3, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 7, 40, 149, 150, 1000]),
    top_p=st.sampled_from([0.0, 0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 1e-3, 0.1, 1.0]),
)


@needs_triton
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    rows=st.lists(cuts, min_size=1, max_size=3), seed=st.integers(0, 2**32), spread=st.sampled_from([0.1, 3.0, 20.0])
)
def test_tokens_are_the_cpus(rows, seed, spread):
    logits_RV = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * spread
    check(logits_RV, rows, [noise_key(seed, position) for position in range(len(rows))])


@pytest.mark.parametrize(
    ("num_kept", "cut"),
    [(1, {"top_k": 1}), (2, {"top_k": 2}), (1, {"top_p": 0.0}), (2, {"top_p": 0.06}), (1, {"top_k": 2, "top_p": 0.4})],
)
def test_no_token_too_many_is_kept_where_all_are_about_as_likely(num_kept, cut, device):
    """One token too many would win about every third row."""
    logits_V = torch.linspace(0.01, 0.0, 32)[torch.randperm(32)]
    likely = set(logits_V.topk(num_kept).indices.tolist())
    columns = parameters([SamplingParams(**cut)] * 12, [noise_key(seed, 1) for seed in range(12)])
    token_R, _ = draw(logits_V.repeat(12, 1).to(device), *columns, config=SMALL)
    assert set(token_R.tolist()) == likely


def test_noise_alone_decides_between_equal_logits(device):
    rows = [SamplingParams()] * 12
    check(torch.zeros(12, VOCAB), rows, [noise_key(seed, 3) for seed in range(12)], Config(columns=256))


def test_banned_tokens_are_never_drawn(device):
    logits_RV = torch.full((6, VOCAB), -math.inf)
    logits_RV[:, [5, 77]] = torch.tensor([0.3, 0.1])
    rows = [SamplingParams(), SamplingParams(top_k=9), SamplingParams(top_p=0.9)] * 2
    check(logits_RV, rows, [noise_key(seed, 0) for seed in range(6)])


def test_all_tokens_that_tie_for_the_last_place_are_kept(device):
    logits_RV = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.9]).expand(8, 5).contiguous()
    rows = [SamplingParams(temperature=2.0, top_k=2)] * 8
    columns = parameters(rows, [noise_key(seed, 0) for seed in range(8)])
    token_R, _ = draw(logits_RV.to(DEVICE), *columns, config=SMALL)
    assert torch.equal(token_R, draw_reference(logits_RV.to(DEVICE), *columns)[0])
    assert len(set(token_R.tolist()) - {4}) > 2
    assert 4 not in token_R


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_finite_maximum_are_reported(temperature, device):
    logits_RV = torch.randn(4, VOCAB, device=device)
    logits_RV[0, 70], logits_RV[1], logits_RV[2, 3] = torch.nan, -math.inf, math.inf
    columns = parameters([SamplingParams(temperature=temperature, top_p=0.5)] * 4, range(4))
    for sound_R in (draw(logits_RV, *columns, config=SMALL)[1], most_likely(logits_RV)[1]):
        assert sound_R.tolist() == [False, False, False, True]


@pytest.mark.parametrize("size", [1, 100, 16384, 40000])
def test_the_most_likely_is_the_first_of_the_largest(size, device):
    logits_RV = torch.randn(3, size, device=device)
    logits_RV[1, size // 2 :: 2048] = logits_RV[1, -1] = 9.0
    for found, expected in zip(most_likely(logits_RV), most_likely_reference(logits_RV), strict=True):
        assert torch.equal(found, expected)


def test_no_rows_give_no_tokens(device):
    logits_RV = torch.empty(0, VOCAB, device=device)
    assert most_likely(logits_RV)[0].shape == draw(logits_RV, *parameters([], []))[0].shape == (0,)
