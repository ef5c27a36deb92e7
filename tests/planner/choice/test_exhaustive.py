"""Before an exhaustive search that takes long, its points and its time are said, and how to avoid it."""

from dataclasses import replace

import pytest

from exeplan.core.bounds import Bound
from exeplan.core.profile import Profile
from exeplan.planner.choice import exhaustive
from exeplan.planner.choice.exhaustive import search_progress
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.progress import Told
from exeplan.workload.files import load_workload


class Listener(Told):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.shares: list[float] = []

    def __call__(self, title: str, share: float) -> None:
        self.shares.append(share)

    def note(self, text: str) -> None:
        self.notes.append(text)


def asked(profile: Profile, max_seqs: int) -> Problem:
    law = load_workload("normal:in=40,10,80;out=12,5,24")
    return make_problem(profile, law, Bound(seconds=1.0), max_seqs=max_seqs)


def test_all_points_are_counted_before(profile: Profile) -> None:
    problem, heard = asked(profile, 8), Listener()
    optimum = optimize(problem, policies=("orca", "rra"), method="exhaustive", told=heard)
    progress = search_progress(problem, {1: problem}, ("orca", "rra"), "exhaustive", Told())
    assert progress.all_points == optimum.plan.search["points"]
    assert heard.shares == sorted(heard.shares)
    assert heard.shares[-1] <= 1


def test_a_long_search_is_announced_with_a_way_out(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, heard = asked(profile, 8), Listener()
    search_progress(problem, {1: problem}, ("rra",), "exhaustive", heard)
    assert heard.notes == []
    monkeypatch.setattr(exhaustive, "seconds_of", lambda groups, num_points: 1e-3 * num_points)
    large = replace(problem, max_seqs=4096)
    progress = search_progress(large, {1: large}, ("rra",), "exhaustive", heard)
    assert progress.all_points is not None
    assert heard.notes[0].startswith(f"exhaustive search of {progress.all_points:,} points, about ")
    assert "branch-and-bound, the default, needs a small part of them" in heard.notes[0]
    search_progress(large, {1: large}, ("rra",), "branch-and-bound", heard)
    assert len(heard.notes) == 1


def test_the_estimate_is_the_mean_of_the_timed_points_times_all(profile: Profile) -> None:
    problem = asked(profile, 64)
    groups = exhaustive.groups_of({1: problem}, ("orca",))
    ticks = iter(0.001 * n for n in range(10_000))
    found = exhaustive.seconds_of(groups, 64, clock=lambda: next(ticks))
    assert found == pytest.approx(64 * 0.001, rel=0.05)
