"""What a plan is told to serve under other lengths is what an engine with that KV cache serves."""

from dataclasses import replace

import numpy as np
import pytest

from exeplan.core.batch import BLOCK_SIZE
from exeplan.core.bounds import Bound
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, single_stage
from exeplan.drift.served import cache_tokens, served
from exeplan.drift.state import RequestLengths, Rules
from exeplan.drift.watch import Watch
from exeplan.errors import Infeasible
from exeplan.planner.problems.problem import make_problem
from exeplan.planner.problems.replays import replay_estimate
from exeplan.workload.arrivals import Arrivals
from exeplan.workload.workload import Workload

TOKENS = 4096
"""A third of what 64 requests of the new lengths take."""


def law(name: str, outputs: np.ndarray) -> Workload:
    count = len(outputs)
    return Workload.of(name, inputs=np.full(count, 30), outputs=outputs, weights=np.full(count, 1.0))


@pytest.fixture(scope="module")
def problem(profile):
    """Of short outputs."""
    return make_problem(profile, law("short", np.array([20])), Bound(seconds=60.0))


@pytest.fixture(scope="module")
def longer(problem):
    """The same of outputs that are nearly ten times as long."""
    outputs = np.random.default_rng(0).integers(60, 300, 4000)
    return replace(problem, workload=law("longer", outputs))


@pytest.fixture
def plan(problem):
    schedule = Schedule("chunked", {"max_num_seqs": 64, "max_num_batched_tokens": 128})
    placement = single_stage(problem.profile.model)
    return Plan(model="demo", schedule=schedule, placement=placement, bound=problem.bound, kv_cache_tokens=TOKENS)


def test_full_batches_that_the_cache_does_not_hold_are_not_promised(plan, problem, longer):
    assert served(problem, plan) == problem.estimate(plan.schedule)
    full, found = longer.estimate(plan.schedule), served(longer, plan)
    _, replayed = replay_estimate(longer, plan.schedule, seed=7, kv_tokens=TOKENS)
    assert full.kv_tokens > 2 * TOKENS
    assert full.throughput > 1.1 * replayed.throughput
    assert found.throughput == pytest.approx(replayed.throughput, rel=0.03)
    assert found.latency == pytest.approx(replayed.latency, rel=0.05)


def test_the_blocks_that_the_engine_has_count_and_not_those_planned(plan, longer):
    assert served(longer, plan, 10 * TOKENS // BLOCK_SIZE) == longer.estimate(plan.schedule)
    assert cache_tokens(longer, plan) == TOKENS
    assert cache_tokens(longer, plan, 7) == 7 * BLOCK_SIZE
    kind = replace(longer.profile.device, kind="cuda")
    gpu = replace(longer, profile=replace(longer.profile, device=kind))
    assert cache_tokens(gpu, plan) == int(gpu.kv_capacity_tokens(plan.schedule)) > TOKENS


def test_a_rate_that_only_full_batches_sustain_is_not_sustained(plan, longer):
    small, full = served(longer, plan).throughput, longer.estimate(plan.schedule).throughput
    between = replace(longer, arrivals=Arrivals(rate=(small + full) / 2))
    assert between.estimate(plan.schedule).throughput == pytest.approx(between.arrivals.rate)
    with pytest.raises(Infeasible, match=r"with a KV cache of 4096 tokens, .* come"):
        served(between, plan)
    served(replace(longer, arrivals=Arrivals(rate=0.9 * small)), plan)


def test_at_a_rate_that_is_sustained_a_small_cache_changes_no_latency(plan, longer):
    sustained = replace(longer, arrivals=Arrivals(rate=0.9 * served(longer, plan).throughput))
    small, large = (
        replay_estimate(sustained, plan.schedule, seed=3, num_requests=3000, kv_tokens=tokens)[1]
        for tokens in (TOKENS, 10 * TOKENS)
    )
    assert small.latency == pytest.approx(large.latency, rel=0.01)
    assert served(sustained, plan) == sustained.estimate(plan.schedule)


def test_the_watch_tells_it_and_proposes_a_larger_cache(plan, problem, longer):
    watch = Watch(plan, problem, rules=Rules(every=4.0, looks=1), policies=("chunked",))
    outputs = np.random.default_rng(1).integers(60, 300, 1200).tolist()
    watch.note([RequestLengths(float(n), 30, o, True) for n, o in enumerate(outputs)], [])
    state, proposal = watch.look(1300.0)
    assert state.predicted.throughput == pytest.approx(served(longer, plan).throughput, rel=0.05)
    assert proposal.plan.kv_cache_tokens > 2 * TOKENS
    assert proposal.new.throughput > 1.1 * proposal.old.throughput
