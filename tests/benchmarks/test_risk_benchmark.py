"""The risk benchmark judges each deployment by the errors of the others."""

from dataclasses import replace

import pytest

from benchmarks.planner.risk import RISK, margins, planned_schedule, trial
from benchmarks.silicon.left_out import FITTED, deployment_name, deployments_of
from benchmarks.silicon.rows import Pair, Prediction, Row, spread_bounds
from exeplan.core.bounds import Bound, utilizations
from exeplan.core.models.model import load_model_spec
from exeplan.planner.margins.sampling_error import sampling_error
from exeplan.planner.problems.problem import make_problem
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet
from exeplan.workload.files import load_workload
from exeplan.workload.workload import Trace, Workload


def pair(size: int, number: int, slower: float) -> Pair:
    row = Row(
        engine="vllm",
        version="1",
        model="llama-3.1-8b",
        dtype="bfloat16",
        system="h100_sxm",
        input_tokens=100,
        output_tokens=101,
        concurrency=2**number,
        tensor_parallel_size=size,
        ttft=0.1 * slower,
        tpot=0.01 * slower,
    )
    return row, Prediction(0.1, 0.01)


PAIRS = [
    pair(size, number, (1.5 if size == 8 else 1.0) + 0.01 * (number % 3))
    for size in (1, 2, 4, 8)
    for number in range(8)
]


def test_a_deployment_that_errs_alone_widens_the_margins_of_the_others_only() -> None:
    laws = margins(PAIRS, spread_bounds)
    for name in ("all rows alike", "the worst other deployment", "by deployment (as planned)"):
        of_size = {row.tensor_parallel_size: laws[name](row) for row, _ in PAIRS}
        assert of_size[8] < 0.15 < of_size[1], name
    assert laws["none"](PAIRS[0][0]) == 0


def test_a_deployment_is_all_runs_of_an_engine_a_model_and_a_size() -> None:
    found = deployments_of(PAIRS, FITTED)
    assert set(found) == {("vllm", "llama-3.1-8b", "bfloat16", size) for size in (1, 2, 4, 8)}
    assert {deployment_name(row) for row, _ in PAIRS} == set(found)
    assert all(one.errors["latency"].count == 8 for one in found.values())
    slow = found["vllm", "llama-3.1-8b", "bfloat16", 8].errors["tpot"]
    assert slow.mean == pytest.approx(0.41, abs=0.01)


def test_a_plan_with_a_margin_keeps_its_bound_where_one_without_breaks_it() -> None:
    bold, careful = zip(*(trial("S", 100, seed) for seed in range(3)), strict=True)
    assert all(plan and plan[0] and plan[1] > 0.05 for plan in careful)
    assert all(plan and plan[1] == 0 for plan in bold)
    assert not all(plan and plan[0] for plan in bold)


def test_the_margin_is_that_of_the_batch_chosen_with_which_it_keeps_the_bound() -> None:
    """Margins fall and rise with the batch: the one of another, tried last, would be another."""
    lengths = load_workload("S")
    profile = profile_from_datasheet(load_model_spec("llama-3.1-8b"), load_datasheet("h100-80gb"), dtype="bfloat16")
    inputs, outputs = lengths.sample(100, seed=1, stratified=False)
    for seconds in (0.8, 1.3, 2.0, 3.0):
        bound = Bound(seconds=seconds)
        problem = make_problem(profile, Workload.of_trace("S", Trace(inputs, outputs)), bound)
        plan = planned_schedule(problem, bound, seed=1, careful=True)
        assert plan is not None
        schedule, margin = plan
        error = sampling_error(problem, schedule, risk=RISK, seed=1)
        assert error is not None
        law = error.laws[0]
        assert law is not None
        assert margin == law.margin(RISK)
        assert max(utilizations((bound,), problem.estimate(schedule))) * (1 + margin) <= 1
    tight = Bound(seconds=1e-3)
    assert planned_schedule(replace(problem, bound=tight), tight, seed=1, careful=False) is None
