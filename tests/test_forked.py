"""Calls in forked processes give what they give one after the other, errors included."""

import os
from functools import partial

import pytest

from exeplan.errors import Infeasible
from exeplan.forked import forked


@pytest.mark.parametrize("seconds", [0.0, 10.0])
def test_results_are_in_order(seconds: float) -> None:
    assert forked([partial(pow, number, 2) for number in range(5)], seconds=seconds) == [0, 1, 4, 9, 16]
    assert forked([], seconds=seconds) == []


def test_what_is_not_worth_a_process_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exeplan.forked.num_processes", lambda: 2)
    assert forked([os.getpid] * 2, seconds=0.001) == [os.getpid()] * 2
    assert os.getpid() not in forked([os.getpid] * 2, seconds=1.0)


def test_what_a_call_raises_is_raised() -> None:
    def refuse() -> None:
        raise Infeasible("not here")

    with pytest.raises(Infeasible, match="not here"):
        forked([refuse, refuse], seconds=1.0)
