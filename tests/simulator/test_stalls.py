"""No stream waits longer between two tokens than the longest stall that its schedule is said to make."""

import math
from dataclasses import replace

import numpy as np
import pytest

from exeplan.core.batch import Batch, Chunk, SequenceState
from exeplan.core.bounds import MAX_ITL, Bound
from exeplan.core.profile import Profile
from exeplan.core.schedule import Schedule, Stage
from exeplan.errors import Infeasible, InputError
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.planner.reports.report import stall_lines
from exeplan.policies import check_schedule, load_policy, policy_names
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
from exeplan.simulator.stalls import longest_stall, most_whole_passes, prompt_tokens
from exeplan.workload.files import load_workload
from exeplan.workload.workload import Workload
from tests.simulator.machine import CLUSTER

SHORT = load_workload("normal:in=40,10,80;out=12,5,24")
ALIKE = load_workload("fixed:in=64;out=16")
ONE_STAGE = (Stage(layers=(0, 6)),)
TWO_STAGES = (Stage(layers=(0, 3), devices=(0,)), Stage(layers=(3, 6), devices=(1,)))
SCHEDULES = (
    Schedule("orca", {"max_num_seqs": 16}),
    Schedule("orca", {"max_num_seqs": 16, "max_num_batched_tokens": 200}),
    Schedule("orca", {"max_num_seqs": 16, "micro_batches": 2, "max_num_batched_tokens": 100}),
    Schedule("chunked", {"max_num_seqs": 16, "max_num_batched_tokens": 48}),
    Schedule("chunked", {"max_num_seqs": 16, "max_num_batched_tokens": 128, "micro_batches": 2}),
    Schedule("sglang", {"max_num_seqs": 16, "max_num_batched_tokens": 48}),
    Schedule("sglang", {"max_num_seqs": 16, "max_num_batched_tokens": 16}),
    Schedule("sglang", {"max_num_seqs": 16, "max_num_batched_tokens": 128, "micro_batches": 2}),
    Schedule("sglang", {"max_num_seqs": 16, "max_num_batched_tokens": 16, "micro_batches": 2}),
    Schedule("rra", {"prefill_batch": 8, "decode_steps": 4}),
    Schedule("rra", {"prefill_batch": 8, "decode_steps": 4, "micro_batches": 2}),
    Schedule("rra", {"prefill_batch": 16, "decode_steps": 4, "decode_batch": 17, "max_num_batched_tokens": 64}),
    Schedule("rra", {"prefill_batch": 16, "decode_steps": 4, "max_num_batched_tokens": 90, "micro_batches": 2}),
    Schedule("static", {"batch_size": 8}),
    Schedule("static", {"batch_size": 8, "micro_batches": 2, "prefill_micro_batches": 4}),
    Schedule("turbo", {"batch_size": 8}),
    Schedule("concat", {"rows": 4, "row_tokens": 128}),
)


def stall(schedule: Schedule, workload: Workload, cost: CostModel) -> float:
    return longest_stall(steady_state(schedule, workload, cost), cost).seconds


def bursts(workload: Workload, schedule: Schedule, cost: CostModel, *, size: int, seed: int) -> float:
    """The longest gap in a replay of requests that come in bursts, one of them some passes before the others."""
    inputs, outputs = workload.sample(10 * size, seed=seed)
    one = cost.batch_seconds(Batch(decode=(SequenceState(request_id="", num_prompt_tokens=64, max_output_tokens=1),)))
    arrivals = np.repeat(np.arange(10) * 2000 * one, size)
    arrivals[np.arange(len(arrivals)) % size > 0] += 12 * one
    run = replay(schedule, cost, input_tokens=inputs, output_tokens=outputs, num_blocks=4000, arrivals=arrivals)
    return run.requests.times.longest_gap()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("workload", [SHORT, ALIKE], ids=lambda w: w.name)
def test_bursts_stall_no_stream_for_longer(schedule: Schedule, workload: Workload, profile: Profile) -> None:
    check_schedule(schedule)
    cost = CostModel(profile, TWO_STAGES if schedule.num_micro_batches > 1 else ONE_STAGE, CLUSTER)
    most = stall(schedule, workload, cost)
    assert max(bursts(workload, schedule, cost, size=17, seed=seed) for seed in range(3)) <= most * 1.001


def test_every_policy_is_among_them() -> None:
    assert {s.policy for s in SCHEDULES} == {n for n in policy_names() if not load_policy(n).SEPARATE_STAGES}


def test_a_burst_stalls_orca_for_its_whole_prefill_and_no_longer(cost: CostModel) -> None:
    schedule = Schedule("orca", {"max_num_seqs": 16})
    assert bursts(ALIKE, schedule, cost, size=17, seed=0) == pytest.approx(stall(schedule, ALIKE, cost), rel=0.02)


def test_a_limit_on_the_tokens_of_a_pass_shortens_that_in_the_same_burst(cost: CostModel) -> None:
    unlimited = Schedule("orca", {"max_num_seqs": 16})
    limited = replace(unlimited, variables={**unlimited.variables, "max_num_batched_tokens": 160})
    assert bursts(ALIKE, limited, cost, size=17, seed=0) < 0.3 * bursts(ALIKE, unlimited, cost, size=17, seed=0)


def test_a_chunk_at_the_end_of_the_longest_prompt_by_hand(cost: CostModel) -> None:
    schedule = Schedule("chunked", {"max_num_seqs": 2, "max_num_batched_tokens": 32})
    steady = steady_state(schedule, ALIKE, cost)
    context = math.ceil(steady.kv_tokens / steady.cycle.num_seqs)
    long, decoding = (SequenceState(request_id="", num_prompt_tokens=n, max_output_tokens=1) for n in (64, context))
    batch = Batch(prefill=(long,), decode=(decoding,), chunks=(Chunk(33, 64, last=True),))
    assert longest_stall(steady, cost).seconds == pytest.approx(cost.batch_seconds(batch))


def test_several_prompts_have_no_more_than_their_longest_ones() -> None:
    law = SHORT.input_law
    assert prompt_tokens(law, 1) == [law.max]
    assert sum(prompt_tokens(law, 50)) < 50 * law.max
    assert prompt_tokens(ALIKE.input_law, 3) == [64] * 3
    assert prompt_tokens(ALIKE.input_law, 3, limit=128) == [64] * 2
    assert prompt_tokens(ALIKE.input_law, 3, limit=10) == [64]


def test_whole_prompts_take_as_many_passes_as_they_fill_by_halves_at_most() -> None:
    assert most_whole_passes(ALIKE.input_law, [64] * 9, 200) == 3
    assert most_whole_passes(ALIKE.input_law, [64] * 9, 100) == 9
    assert most_whole_passes(ALIKE.input_law, [64] * 9, 10) == 9
    assert most_whole_passes(SHORT.input_law, [40] * 100, 150) == 2 * 27 - 1


def prefill(*spans: tuple[int, int]) -> Batch:
    """Of parts of prompts with 64 tokens."""
    one = SequenceState(request_id="", num_prompt_tokens=64, max_output_tokens=1)
    return Batch(prefill=(one,) * len(spans), chunks=tuple(Chunk(*span, last=span[1] == 64) for span in spans))


@pytest.mark.parametrize(
    ("schedule", "passes"),
    [
        (
            Schedule("sglang", {"max_num_seqs": 3, "max_num_batched_tokens": 48}),
            [
                prefill((0, 48)),
                prefill((48, 64), (0, 32)),
                prefill((32, 64), (0, 16)),
                prefill((16, 64)),
                prefill((0, 48)),
                prefill((48, 64)),
            ],
        ),
        (
            Schedule("rra", {"prefill_batch": 4, "decode_steps": 2, "decode_batch": 3, "max_num_batched_tokens": 100}),
            [prefill((0, 64))] * 4,
        ),
    ],
    ids=lambda value: getattr(value, "policy", None),
)
def test_all_passes_of_four_prompts_under_a_limit_by_hand(
    schedule: Schedule, passes: list[Batch], cost: CostModel
) -> None:
    steady = steady_state(schedule, ALIKE, cost)
    context = math.ceil(steady.kv_tokens / steady.cycle.num_seqs)
    decoding = SequenceState(request_id="", num_prompt_tokens=context, max_output_tokens=1)
    found = longest_stall(steady, cost)
    assert found.seconds == pytest.approx(sum(map(cost.batch_seconds, [*passes, Batch(decode=(decoding,) * 3)])))
    assert (found.num_prompts, found.num_tokens) == (4, 256)


def prompts(number: int, tokens: int) -> tuple[SequenceState, ...]:
    return (SequenceState(request_id="", num_prompt_tokens=tokens, max_output_tokens=1),) * number


@pytest.mark.parametrize(
    ("variables", "tokens", "passes"),
    [
        ({"prefill_batch": 10, "max_num_batched_tokens": 300}, 141, [2, *[1] * 8]),
        ({"prefill_batch": 10, "max_num_batched_tokens": 300, "micro_batches": 10}, 141, [1] * 10),
        ({"prefill_batch": 10, "micro_batches": 4}, 149, [3, 3, 2, 2]),
    ],
    ids=str,
)
def test_passes_of_unequally_many_prompts_have_no_more_than_there_are(
    variables: dict[str, int], tokens: int, passes: list[int], cost: CostModel
) -> None:
    """Ten prompts have 1402 tokens together, three 446; nine passes of a limit of 300 cannot be of two prompts each."""
    workload = load_workload("normal:in=130,8,200;out=16,3,24")
    assert [prompt_tokens(workload.input_law, n)[0] for n in (10, 3)] == [141, 149]
    schedule = Schedule("rra", {"decode_steps": 2, **variables})
    steady = steady_state(schedule, workload, cost)
    found = longest_stall(steady, cost)
    assert (found.num_prompts, found.num_tokens) == (10, 10 * tokens)
    groups, residents = schedule.num_micro_batches, steady.cycle.num_seqs
    context, rows = steady.kv_tokens / residents, (residents + 4 * math.sqrt(residents)) / groups
    decode = Batch(decode=prompts(math.ceil(rows), math.ceil(context)))
    each = [Batch(prefill=prompts(number, tokens)) for number in passes] + [decode] * groups
    assert found.seconds == pytest.approx(sum(map(cost.batch_seconds, each)))


def test_groups_that_take_turns_have_no_more_prompts_than_come_before_a_token(cost: CostModel) -> None:
    """Ten slots of three groups, and the rest of a prompt that was cut in each: the largest group prefills five."""
    schedule = Schedule("sglang", {"max_num_seqs": 10, "max_num_batched_tokens": 64, "micro_batches": 3})
    found = longest_stall(steady_state(schedule, ALIKE, cost), cost)
    assert (found.num_prompts, found.num_tokens) == (13, 13 * 64)


def asked(profile: Profile, *more: Bound) -> Problem:
    problem = make_problem(profile, SHORT, Bound(seconds=math.inf), max_seqs=64)
    return replace(problem, more_bounds=more)


@pytest.mark.parametrize("policy", ["orca", "chunked", "rra"])
def test_a_bounded_plan_keeps_the_bound_by_its_passes_and_in_its_replay(policy: str, profile: Profile) -> None:
    free = optimize(asked(profile), policies=(policy,)).plan
    seconds = free.longest_stall["seconds"] / 3
    found = optimize(asked(profile, Bound(seconds=seconds, metric=MAX_ITL)), policies=(policy,))
    plan = found.plan
    assert plan.estimate is not None
    assert plan.replay is not None
    assert free.estimate is not None
    assert plan.longest_stall["seconds"] == plan.estimate.percentiles[MAX_ITL] <= seconds
    assert found.run.requests.times.longest_gap() == plan.replay.percentiles[MAX_ITL] <= seconds
    assert 0 < plan.estimate.throughput <= free.estimate.throughput


def test_a_bound_below_one_decode_pass_is_refused_with_what_is_possible(profile: Profile) -> None:
    with pytest.raises(Infeasible, match="for the longest gap between two tokens"):
        optimize(asked(profile, Bound(seconds=1e-5, metric=MAX_ITL)), policies=("chunked",))


def test_a_bound_on_the_tpot_limits_bursts_at_no_cost(profile: Profile) -> None:
    free = optimize(asked(profile), policies=("orca",)).plan
    assert free.estimate is not None
    bound = Bound(seconds=1.2 * free.estimate.tpot, metric="tpot")
    plan = optimize(asked(profile, bound), policies=("orca",)).plan
    assert plan.estimate is not None
    assert plan.schedule["max_num_batched_tokens"] >= plan.schedule["max_num_seqs"]
    assert plan.longest_stall["seconds"] < 0.6 * free.longest_stall["seconds"]
    assert plan.estimate.throughput >= 0.99 * free.estimate.throughput


def test_a_stall_that_readers_notice_is_told_where_nothing_bounds_it(profile: Profile) -> None:
    slow = replace(profile, measurements=tuple(replace(row, seconds=100 * row.seconds) for row in profile.measurements))
    problem = asked(slow)
    lines = stall_lines(optimize(problem, policies=("orca",)), problem)
    assert lines[0].startswith("longest stall of a stream by passes: at most")
    assert lines[0].endswith(" in the replay")
    assert "give --itl or --tpot" in lines[1]
    bounded = asked(slow, Bound(seconds=20.0, metric=MAX_ITL))
    assert len(stall_lines(optimize(bounded, policies=("orca",)), bounded)) == 1


def test_a_longer_gap_of_the_replay_is_explained(profile: Profile) -> None:
    optimum = optimize(asked(profile), policies=("orca",))
    assert stall_lines(optimum, asked(profile))[0].endswith(" in the replay")
    shorter = {**optimum.plan.longest_stall, "seconds": optimum.run.requests.times.longest_gap() / 2}
    optimum = replace(optimum, plan=replace(optimum.plan, longest_stall=shorter))
    assert "in the replay, with waits for a place to decode" in stall_lines(optimum, asked(profile))[0]


def test_a_limit_below_the_slots_is_refused() -> None:
    with pytest.raises(InputError, match="max_num_batched_tokens=8 limits to 8 tokens"):
        check_schedule(Schedule("orca", {"max_num_seqs": 16, "max_num_batched_tokens": 8}))
