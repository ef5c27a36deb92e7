"""How many bursts of real load follow a round of a profile."""

from types import SimpleNamespace

import pytest

from exeplan.profiler.measuring import campaign
from exeplan.profiler.measuring.campaign import Campaign, Goal

BUDGET = 30.0


class Bursting(Campaign):
    """Bursts of two seconds by a clock of its own, and nothing else of a campaign."""

    def __init__(
        self, *, restless: bool | None, elapsed: float, burst_seconds: float = 0.0, has_passes: bool = True
    ) -> None:
        self.has_passes = has_passes
        self.now, self.burst_seconds = elapsed, burst_seconds
        self.goal = Goal(started=0.0, budget_seconds=BUDGET, target_error=0.03)
        self.reference = None if restless is None else SimpleNamespace(restless=restless)
        self.bursts = {False: [], True: []}

    def _burst(self) -> bool:
        self.now += 2.0
        self.burst_seconds += 2.0
        self.bursts[False].append([])
        return self.has_passes


def bursts_after(monkeypatch: pytest.MonkeyPatch, **state) -> int:
    found = Bursting(**state)
    monkeypatch.setattr(campaign, "time", SimpleNamespace(monotonic=lambda: found.now))
    found._bursts()
    return len(found.bursts[False])


@pytest.mark.parametrize("restless", [False, None])
def test_a_round_on_a_steady_machine_has_one_burst_within_a_quarter_of_the_time(monkeypatch, restless):
    assert bursts_after(monkeypatch, restless=restless, elapsed=12.0) == 1
    assert bursts_after(monkeypatch, restless=restless, elapsed=12.0, burst_seconds=3.0) == 1
    assert bursts_after(monkeypatch, restless=restless, elapsed=12.0, burst_seconds=3.1) == 0


def test_on_a_restless_machine_bursts_fill_a_third_of_the_time(monkeypatch):
    assert bursts_after(monkeypatch, restless=True, elapsed=12.0) == 4
    assert bursts_after(monkeypatch, restless=True, elapsed=12.0, burst_seconds=4.1) == 0


def test_bursts_begin_no_further_one_beyond_the_budget(monkeypatch):
    assert bursts_after(monkeypatch, restless=True, elapsed=BUDGET - 1.0) == 1


def test_a_burst_without_passes_is_not_repeated_in_its_round(monkeypatch):
    assert bursts_after(monkeypatch, restless=True, elapsed=12.0, has_passes=False) == 1
