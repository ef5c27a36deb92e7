"""The risk benchmark judges each deployment by the errors of the others."""

import pytest

from benchmarks.planner.risk import margins, trial
from benchmarks.silicon.left_out import FITTED, deployment_name, deployments_of
from benchmarks.silicon.rows import Pair, Prediction, Row, spread_bounds


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
    found = [trial("S", 100, seed) for seed in range(3)]
    assert all(careful[0] for _, careful in found)
    assert all(careful[1] > 0.05 and bold[1] == 0 for bold, careful in found)
    assert not all(bold[0] for bold, _ in found)
