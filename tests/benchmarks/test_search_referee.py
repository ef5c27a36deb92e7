"""What a search lost: nothing found and a broken limit are all of it, and more than is listed is not the same."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.planner import search_cluster
from benchmarks.planner.referee import Verdict, counts, judged
from exeplan.core.bounds import Bound
from exeplan.core.profile import Profile
from exeplan.planner.choice.search_space import search_variants
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.workload.files import load_workload


@pytest.mark.parametrize(
    ("found", "best", "broken", "loss", "said"),
    [
        (4.0, 4.0, (), 0.0, "loss 0 %"),
        (3.0, 4.0, (), 0.25, "loss 25 %"),
        (0.0, 4.0, (), 1.0, "loss 100 %: nothing is found within the limits"),
        (0.0, 0.0, (), 0.0, "loss 0 %"),
        (5.0, 4.0, (), -0.25, "25 % above the reference"),
        (5.0, 0.0, (), -1.0, "100 % above the reference"),
        (4.0, 4.0, ("latency", "memory"), 1.0, "loss 100 %: it breaks the limit of latency and memory"),
    ],
)
def test_a_loss_is_told_apart_from_a_tie_and_from_a_gain(
    found: float, best: float, broken: tuple[str, ...], loss: float, said: str
) -> None:
    verdict = Verdict(found=found, best=best, broken=broken)
    assert (verdict.loss, verdict.said) == (loss, said)


def test_what_is_above_the_list_is_not_counted_as_the_same() -> None:
    assert counts([0.0, 1e-12, -1e-12, -0.2, 1.0, 0.01]) == (3, 1)


def asked(profile: Profile) -> Problem:
    return make_problem(profile, load_workload("normal:in=40,10,80;out=12,5,24"), Bound(seconds=0.1), max_seqs=16)


def test_the_point_found_must_keep_the_bound_and_the_memory(profile: Profile) -> None:
    problem = asked(profile)
    found = search_variants(problem, "orca", method="branch-and-bound", bound=0.1)
    assert found is not None
    assert found[0].best is not None
    best = found[0].best.outcome.throughput
    assert judged(problem, "orca", found, best=best, bound=0.1).loss == 0
    assert judged(problem, "orca", found, best=best, bound=0.01).broken == ("latency",)
    assert judged(replace(problem, max_seqs=1), "orca", found, best=best, bound=0.1).broken == ("memory",)
    nothing = replace(found[0], best=None), found[1]
    assert judged(problem, "orca", nothing, best=best, bound=0.1).loss == 1
    assert judged(problem, "orca", None, best=best, bound=0.1).loss == 1


@pytest.mark.parametrize("method_finds", ["a result without a best point", "no placement"])
def test_a_case_in_which_branch_and_bound_finds_nothing_is_a_loss(
    method_finds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def searched(*given: Any, method: str, **options: Any) -> Any:
        result = search_variants(*given, method=method, **options)
        if method == "exhaustive" or result is None:
            return result
        return None if method_finds == "no placement" else (replace(result[0], best=None), result[1])

    monkeypatch.setattr(search_cluster, "search_variants", searched)
    case = search_cluster.compare(0, 8)
    assert case is not None
    assert case["loss"] == 1
