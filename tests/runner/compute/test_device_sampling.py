"""sample_on_device() samples what sample() samples on the host, row by row, and does not wait before `to_host`.

The kernels' references stand in for the kernels, whose own tests compare the two.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch.utils._python_dispatch import TorchDispatchMode

from exeplan.kernels.select import REFERENCE, Kernels
from exeplan.runner.compute.tokens.device_sampling import _parameters, needs_tokens, sample_on_device
from exeplan.runner.compute.tokens.sampling import SamplingParams, sample

VOCAB = 50
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_k=st.sampled_from([-1, 0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    min_tokens=st.sampled_from([0, 4]),
    logprobs=st.sampled_from([None, 0, 3]),
    logit_bias=st.sampled_from([{}, {7: 2.5, 8: -1.0}]),
)


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


rows = st.builds(
    Row,
    params,
    st.integers(0, 2**63 - 1),
    prompt_token_ids=tokens,
    output_token_ids=tokens,
    banned_token_ids=st.just((2, 3)),
)


def random_logits(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32), batch=st.lists(rows, min_size=1, max_size=6))
def test_tokens_and_logprobs_are_those_of_the_host(seed, batch):
    logits = random_logits(seed, len(batch), VOCAB)
    ours, theirs = sample_on_device(logits.clone(), batch, REFERENCE).to_host(), sample(logits.clone(), batch)
    assert [token.token_id for token in ours] == [token.token_id for token in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [token for token, _ in one.top_logprobs] == [token for token, _ in other.top_logprobs]
        assert [p for _, p in one.top_logprobs] == pytest.approx([p for _, p in other.top_logprobs], abs=1e-5)


def test_a_row_draws_the_same_token_in_any_batch():
    row = Row(SamplingParams(temperature=1.0, top_p=0.9), seed=7, output_token_ids=[1, 2])
    others = [Row(SamplingParams(temperature=0.5, repetition_penalty=1.2), seed=n) for n in range(3)]
    logits = random_logits(0, 4, VOCAB)
    alone = sample_on_device(logits[2:3].clone(), [row], REFERENCE).to_host()
    assert sample_on_device(logits.clone(), [*others[:2], row, others[2]], REFERENCE).to_host()[2] == alone[0]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_parameters_are_aligned_to_16_bytes_in_any_batch(count):
    """The kernel is compiled for aligned ones before the first request, and anew for others."""
    sampling = SamplingParams(temperature=0.7, top_k=5, top_p=0.75, min_p=0.5)
    found = _parameters([Row(sampling)] * count, [0] * count, torch.device("cpu"))
    assert [field.storage_offset() * field.element_size() % 16 for field in found] == [0] * 5
    temperature_R, top_k_R, tail_R, least_R, key_R = (field.tolist() for field in found)
    assert temperature_R == pytest.approx([0.7] * count)
    assert (top_k_R, tail_R, least_R) == ([5] * count, [0.25] * count, pytest.approx([math.log(0.5)] * count))
    assert len(key_R) == count


def test_positions_count_tokens_that_the_host_does_not_know_yet():
    drawing = SamplingParams(temperature=1.0, min_tokens=3)
    known = Row(drawing, seed=7, output_token_ids=[4, 4, 4], banned_token_ids=(1,))
    behind = Row(drawing, seed=7, output_token_ids=[4, 4], banned_token_ids=(1,))
    logits = random_logits(0, 1, VOCAB)
    expected = sample_on_device(logits.clone(), [known], REFERENCE).to_host()
    assert sample_on_device(logits.clone(), [behind], REFERENCE, positions=[3]).to_host() == expected
    logits[0, 1] = 100.0
    assert sample_on_device(logits.clone(), [behind], REFERENCE, positions=[3]).to_host()[0].token_id == 1
    assert sample_on_device(logits.clone(), [behind], REFERENCE).to_host()[0].token_id != 1


def test_only_penalties_need_the_tokens_themselves():
    assert not needs_tokens([Row(SamplingParams(temperature=0.0)), Row(SamplingParams(logprobs=2, min_tokens=3))])
    assert needs_tokens([Row(SamplingParams(frequency_penalty=0.1))])


def test_a_row_that_is_not_finite_has_no_token_and_changes_no_other():
    logits = random_logits(0, 3, VOCAB)
    logits[0, 5], logits[1] = math.nan, -math.inf
    batch = [Row(SamplingParams(logprobs=1)), Row(SamplingParams()), Row(SamplingParams(temperature=0.0))]
    found = sample_on_device(logits.clone(), batch, REFERENCE).to_host()
    assert found[:2] == [None, None]
    assert found[2].token_id == logits[2].argmax()


def test_draws_follow_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, 0.5])
    batch = [Row(SamplingParams(temperature=1.5), seed=n) for n in range(4000)]
    found = sample_on_device(logits.repeat(len(batch), 1), batch, REFERENCE).token_R
    expected = (logits / 1.5).softmax(-1) * len(batch)
    assert chisquare(found.bincount(minlength=4).numpy(), expected.numpy()).pvalue > 1e-3


class _Counted(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        self.counts[str(operation)] += 1
        return operation(*arguments, **(named or {}))


def test_the_host_reads_nothing_and_launches_as_much_for_many_rows_as_for_few():
    everything = SamplingParams(
        temperature=0.7,
        repetition_penalty=1.2,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={3: 1.0},
        min_tokens=4,
        logprobs=2,
    )
    kernels = Kernels(**{**vars(REFERENCE), "draw": lambda logits, *parameters: REFERENCE.most_likely(logits)})

    def launched(count: int) -> Counter[str]:
        batch = [Row(everything, prompt_token_ids=[1, 2], output_token_ids=[4, 4], banned_token_ids=(2,))] * count
        with _Counted() as mode:
            sample_on_device(random_logits(0, count, VOCAB), batch, kernels)
        return mode.counts

    few, many = launched(2), launched(64)
    assert few == many
    assert not {name for name in many if "item" in name or "local_scalar" in name or "nonzero" in name}
