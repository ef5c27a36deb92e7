"""The oracle agrees with cases by hand and loses no request; the survival comb is that of a renewal process."""

from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from exeplan.workload.files import load_workload
from exeplan.workload.workload import Workload

from .oracle import Replayed, chunked, orca, rra, static, waa

TASKS = ("S", "T", "G", "C1", "C2")
TRACES = ("alpaca", "azure-2023-conv", "azure-2023-code", "wmt17-ende", "mooncake-conv")
NUM_DRAWS, NUM_BANDS = 2_000_000, 300

Ints = NDArray[np.int64]


def one_second(stage: int, prefills: list[tuple[int, int]], decodes: list[int], padded_to: int) -> float:
    return 1.0


def by_load(stage: int, prefills: list[tuple[int, int]], decodes: list[int], padded_to: int) -> float:
    """Uneven stages; every token and every token of context costs something."""
    prompts = sum(max(new, padded_to) + 0.01 * before for new, before in prefills)
    return (1 + 0.5 * stage) * (1.0 + 0.1 * prompts + 0.2 * len(decodes) + 0.001 * sum(decodes))


unit: dict[str, Any] = {"num_stages": 2, "stage_seconds": one_second, "first_token_from_prefill": True}
"""Two stages of one second: a pass that enters at t is back at t + 2, and the next can enter at t + 1."""


def begins(replayed: Replayed) -> list[float]:
    return [one.visits[0].begin for one in replayed.passes]


def test_static_keeps_finished_rows_and_starts_the_next_batch_when_the_pipeline_is_empty() -> None:
    found = static([3, 7, 4], [1, 3, 2], batch_size=2, micro_batches=2, prefill_micro_batches=1, **unit)
    # One padded prefill at 0; two iterations of two groups from 2. The last token is there at 7; at 6 that is not yet
    # known, so the first group enters once more and leaves at 8.
    assert begins(found) == [0, 2, 3, 4, 5, 6, 8, 10]
    assert found.requests == [(0, [2]), (0, [2, 5, 7]), (8, [10, 12])]
    assert [one.padded_to for one in found.passes] == [7, 0, 0, 0, 0, 0, 4, 0]
    assert [one.decodes for one in found.passes] == [[], [3], [7], [3], [8], [3], [], [4]]


def test_static_cuts_the_prefill_into_its_own_number_of_micro_batches() -> None:
    found = static([3, 7, 4], [2, 2, 2], batch_size=3, micro_batches=1, prefill_micro_batches=2, **unit)
    assert [one.prefills for one in found.passes] == [[(3, 0), (7, 0)], [(4, 0)], []]
    assert [one.padded_to for one in found.passes] == [7, 7, 0]
    assert found.requests == [(0, [2, 5]), (0, [2, 5]), (1, [3, 5])]


def test_static_pads_no_row_beyond_its_own_length() -> None:
    found = static([3, 7], [2, 4], batch_size=2, micro_batches=1, prefill_micro_batches=1, **unit)
    assert [one.decodes for one in found.passes] == [[], [3, 7], [4, 8], [4, 9]]


def test_rra_decodes_what_is_back_and_prefills_right_behind_it() -> None:
    found = rra([5, 6], [3, 2], prefill_batch=1, decode_steps=1, micro_batches=1, **unit)
    # Prefill 0-2, decode 2-4, the next prefill right behind it 3-5, decodes 5-7.
    assert begins(found) == [0, 2, 3, 5]
    assert found.requests == [(0, [2, 4, 7]), (3, [5, 7])]
    assert [one.decodes for one in found.passes] == [[], [5], [], [6, 6]]


def test_rra_skips_an_empty_group() -> None:
    found = rra([5] * 4, [3, 2, 2, 2], prefill_batch=2, decode_steps=2, micro_batches=2, **unit)
    # Prefills at 0 and 1, each group when its own is back, at 2 and 3; the first again at 4; the second is found empty
    # at 5: next cycle.
    assert begins(found) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert found.requests == [(0, [2, 4, 6]), (1, [3, 5]), (5, [7, 9]), (6, [8, 10])]


def test_rra_deals_its_residents_anew_each_cycle() -> None:
    found = rra([5] * 6, [2, 9, 2, 9, 9, 9], prefill_batch=4, decode_steps=1, micro_batches=2, **unit)
    first, second = found.passes[2:4], found.passes[6:8]
    assert [one.decodes for one in first] == [[5, 5], [5, 5]]
    assert [one.decodes for one in second] == [[6, 5], [6, 5]]  # Both survivors were in one group.


def test_orca_refills_a_group_when_it_is_back() -> None:
    found = orca([5] * 3, [2, 1, 2], max_num_seqs=2, micro_batches=2, **unit)
    # One slot a group: the second is back at 3 with its slot free.
    assert begins(found) == [0, 1, 2, 3, 5]
    assert found.requests == [(0, [2, 4]), (1, [3]), (3, [5, 7])]


def test_orca_mixes_prefills_and_decodes_in_one_pass() -> None:
    found = orca([5, 6, 7], [1, 3, 2], max_num_seqs=2, micro_batches=1, **unit)
    assert [(one.prefills, one.decodes) for one in found.passes] == [
        ([(5, 0), (6, 0)], []),
        ([(7, 0)], [6]),
        ([], [7, 7]),
    ]
    assert found.requests == [(0, [2]), (0, [2, 4, 6]), (2, [4, 6])]


def test_chunked_runs_decodes_first_and_cuts_the_last_prompt() -> None:
    found = chunked([6, 3], [2, 2], max_num_seqs=2, max_num_batched_tokens=4, micro_batches=1, **unit)
    assert [(one.prefills, one.decodes) for one in found.passes] == [
        ([(4, 0)], []),
        ([(2, 4), (2, 0)], []),
        ([(1, 2)], [6]),
        ([], [3]),
    ]
    assert found.requests == [(0, [4, 6]), (2, [6, 8])]


def test_waa_groups_take_ready_requests_oldest_first() -> None:
    found = waa(
        [5] * 3, [3, 2, 2], decode_batch=2, prefill_batch=1, micro_batches=2,
        num_prefill_stages=1, num_decode_stages=1, kv_transfer=lambda prompts: 1.0,
        stage_seconds=one_second, first_token_from_prefill=True,
    )  # fmt: skip
    # Prefills at 0, 1, 2 are ready at 2, 3, 4. At 3 the second group has waited longer than the first, which is just
    # back; the same at 5, when its slot is free again.
    assert found.requests == [(0, [1, 3, 5]), (1, [2, 4]), (2, [3, 6])]


def test_waa_prefills_no_more_than_the_limit_lets_wait() -> None:
    found = waa(
        [5] * 5, [3] * 5, decode_batch=1, prefill_batch=1, micro_batches=1,
        num_prefill_stages=1, num_decode_stages=1, kv_transfer=lambda prompts: 0.0,
        stage_seconds=one_second, first_token_from_prefill=True,
    )  # fmt: skip
    # Two may wait; a decode takes 2 s, so from the fourth on a prefill waits for a request to be taken at 3, 5, 7.
    assert [request.start for request in found.requests] == [0, 1, 2, 3, 5]
    assert [request.token_times[1:] for request in found.requests] == [[2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


def test_waa_streams_prefill_batches_through_its_prefill_stages() -> None:
    seen: list[list[int]] = []

    def kv_transfer(prompts: list[int]) -> float:
        seen.append(prompts)
        return 0.5

    found = waa(
        [5, 6, 7], [1, 2, 2], decode_batch=4, prefill_batch=2, micro_batches=1,
        num_prefill_stages=2, num_decode_stages=2, kv_transfer=kv_transfer,
        stage_seconds=one_second, first_token_from_prefill=True,
    )  # fmt: skip
    assert seen == [[6], [7]]  # A request that ends with the prefill needs no decode stage.
    assert found.requests == [(0, [2]), (0, [2, 4.5]), (1, [3, 6.5])]
    assert [[visit.stage for visit in one.visits] for one in found.passes] == [[0, 1], [0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize("policy", ["static", "rra", "orca", "chunked", "waa"])
def test_encoder_decoder_requests_get_their_first_token_from_a_decode(policy: str) -> None:
    found = SMALL[policy]([5], [1], stage_seconds=one_second, first_token_from_prefill=False)
    assert found.requests == [(0, [2.5 if policy == "waa" else 4.0])]  # waa: one stage each, 0.5 s between them.
    assert [one.decodes for one in found.passes] == [[], [5]]


def test_chunked_refuses_more_rows_than_tokens() -> None:
    with pytest.raises(ValueError, match="3 tokens a pass, but 4 rows"):
        chunked([5], [1], max_num_seqs=4, max_num_batched_tokens=3, micro_batches=1, **unit)


SMALL: dict[str, Callable[..., Replayed]] = {
    "static": partial(static, batch_size=3, micro_batches=2, prefill_micro_batches=2, num_stages=2),
    "rra": partial(rra, prefill_batch=2, decode_steps=3, micro_batches=2, num_stages=2),
    "orca": partial(orca, max_num_seqs=5, micro_batches=2, num_stages=2),
    "chunked": partial(chunked, max_num_seqs=5, max_num_batched_tokens=7, micro_batches=2, num_stages=2),
    "waa": partial(
        waa, decode_batch=5, prefill_batch=2, micro_batches=2, num_prefill_stages=1, num_decode_stages=1,
        kv_transfer=lambda prompts: 0.1 * sum(prompts),
    ),
}  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(sorted(SMALL)),
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=25),
    st.booleans(),
)
def test_no_request_is_lost_and_a_stage_runs_one_pass_at_a_time(
    policy: str, lengths: list[tuple[int, int]], first_token_from_prefill: bool
) -> None:
    inputs, outputs = [i for i, _ in lengths], [o for _, o in lengths]
    found = SMALL[policy](inputs, outputs, stage_seconds=by_load, first_token_from_prefill=first_token_from_prefill)
    assert [len(request.token_times) for request in found.requests] == outputs
    for request in found.requests:
        assert all(np.diff([request.start, *request.token_times]) > 0)
    assert sum(new for one in found.passes for new, _ in one.prefills) == sum(inputs)
    rows = sum(len(one.decodes) for one in found.passes)
    steps = sum(outputs) - first_token_from_prefill * len(outputs)
    assert rows >= steps if policy == "static" else rows == steps
    visits = defaultdict(list)
    for one in found.passes:
        for visit in one.visits:
            visits[visit.stage].append((visit.begin, visit.end))
    for times in visits.values():
        assert all(end <= begin for (_, end), (begin, _) in pairwise(times))


@lru_cache(maxsize=1)  # Tests of one workload follow each other.
def drawn(text: str) -> tuple[Workload, Ints, Ints]:
    """The workload, and inputs and outputs of requests drawn from its joint histogram, in random order.

    Systematic draws: equidistant along a path through the histogram, with one random offset, then shuffled. Means are
    those of independent draws, errors far smaller. The path visits bands of rising output that hold equal shares of all
    output tokens, and inside a band goes up and down by input.
    """
    workload, rng = load_workload(text), np.random.default_rng(2024)
    tokens = workload.weights * workload.outputs
    band = ((np.cumsum(tokens) - tokens / 2) / tokens.sum() * NUM_BANDS).astype(np.int64)
    path = np.lexsort((workload.outputs, np.where(band % 2, workload.inputs, -workload.inputs), band))
    cdf = np.cumsum(workload.weights[path])
    quantiles = (np.arange(NUM_DRAWS) + rng.random()) / NUM_DRAWS * cdf[-1]
    chosen = rng.permutation(path[np.searchsorted(cdf, quantiles, side="right")])
    return workload, workload.inputs[chosen], workload.outputs[chosen]


def renewal(inputs: Ints, decodes: Ints, *, steps: int) -> tuple[Ints, Ints]:
    """The decoding requests of each iteration of a long run, and their cached tokens before it: [cycle, iteration].

    Every cycle admits the next `steps` requests. One that joins at iteration g0 decodes in g0 .. g0 + D - 1 and holds
    I + g - g0 tokens in g. The first cycles, before every group could have joined, are left out.
    """
    cycles = len(inputs) // steps
    joined = np.arange(cycles * steps) // steps * steps
    left = joined + decodes[: len(joined)]
    offset = inputs[: len(joined)] - joined

    def present(values: Ints | None) -> Ints:
        ins, outs = (np.bincount(at, values, minlength=int(left.max()) + 1) for at in (joined, left))
        return np.cumsum(ins - outs).astype(np.int64)[: cycles * steps]

    active = present(None)
    context = present(offset) + active * np.arange(cycles * steps)
    warm = -(-int(decodes.max()) // steps)
    return active.reshape(cycles, steps)[warm:], context.reshape(cycles, steps)[warm:]


@pytest.mark.parametrize(("steps", "first_token_from_prefill"), [(1, True), (16, True), (16, False)])
@pytest.mark.parametrize("text", [*TASKS, *TRACES])
def test_comb_is_the_steady_state_of_a_renewal_process(text: str, steps: int, first_token_from_prefill: bool) -> None:
    workload, inputs, outputs = drawn(text)
    active, context = renewal(inputs, outputs - first_token_from_prefill, steps=steps)
    comb = workload.decode_law(first_token_from_prefill=first_token_from_prefill).comb(steps)
    assert steps * comb.active == pytest.approx(active.mean(axis=0), rel=5e-4)
    assert steps * comb.context == pytest.approx(context.mean(axis=0), rel=5e-4)


@pytest.mark.parametrize("text", TRACES)
def test_the_context_of_a_real_trace_depends_on_its_correlation(text: str) -> None:
    """Inputs that are dealt out anew among the requests would miss the context by far more than the digits above."""
    _, inputs, outputs = drawn(text)
    _, context = renewal(inputs, outputs - 1, steps=1)
    _, independent = renewal(np.random.default_rng(1).permutation(inputs), outputs - 1, steps=1)
    assert abs(context.mean() / independent.mean() - 1) > 0.01
