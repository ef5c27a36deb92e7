"""Calls at the same time, in processes that are forked for them: what they need is inherited, results are sent."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_all_start_methods, get_context
from typing import TypeVar

Result = TypeVar("Result")

_WORTH = 0.1
"""Seconds of a call: to start processes for less gains little."""

_calls: list[Sequence[Callable[[], object]]] = []
"""Of this worker process."""


def num_processes() -> int:
    """Processes that may compute at once; 1 on a system without fork."""
    if "fork" not in get_all_start_methods():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def forked(calls: Sequence[Callable[[], Result]], *, seconds: float) -> list[Result]:
    """The result of each call, in order; one after the other on one processor, and where what one takes, about so many
    `seconds`, is not worth a process."""
    number = min(len(calls), num_processes())
    if number <= 1 or seconds < _WORTH:
        return [call() for call in calls]
    with ProcessPoolExecutor(number, get_context("fork"), initializer=_inherit, initargs=(calls,)) as pool:
        return list(pool.map(_call, range(len(calls))))  # type: ignore[arg-type]


def _inherit(calls: Sequence[Callable[[], object]]) -> None:
    _calls[:] = [calls]


def _call(number: int) -> object:
    return _calls[0][number]()
