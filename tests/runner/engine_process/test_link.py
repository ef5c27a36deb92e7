"""An engine process that is silent or stopped for too long is killed; its end comes with a reason."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from exeplan.runner.engine_process.link import EngineLink, engine_forks
from exeplan.runner.ipc.child_process import is_stopped
from exeplan.runner.ipc.fork_server import ForkServer

from ..processes import eventually


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    with contextlib.closing(engine_forks()) as server:
        yield server


def killed(forks: ForkServer, *, stop: bool, looks: int) -> tuple[int | None, str]:
    """What becomes of an engine without a setup, which sends nothing, after some looks of a second each."""

    async def watch() -> tuple[int | None, str]:
        link = await EngineLink.open(forks)
        if stop:
            os.kill(link.pid, signal.SIGSTOP)
            eventually(lambda: is_stopped(link.pid))
        for _ in range(looks):
            link.watch(1.0, patience=5.0, stopped=2.0)
        return await link.end(patience=0.0 if stop else 30.0)

    return asyncio.run(watch())


@pytest.mark.parametrize(
    ("stop", "looks", "ended"),
    [
        (False, 5, (0, "the engine process ended unexpectedly (status 0)")),
        (False, 6, (-9, "the engine process made no progress for 5 s")),
        (True, 2, (-9, "the engine process ended unexpectedly (signal 9)")),
        (True, 3, (-9, "the engine process was stopped by a signal")),
    ],
)
def test_it_is_killed_after_as_many_looks_as_it_may_be_silent_or_stopped(forks, stop, looks, ended):
    assert killed(forks, stop=stop, looks=looks) == ended
