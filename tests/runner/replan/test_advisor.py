"""The advisor leaves the processors to others, also where they are shared out by session; late answers reach nobody."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from exeplan.runner.replan import replanner as replan
from exeplan.runner.replan.replanner import _AdvisorProcess

CODE = """
import os
from exeplan.runner.replan.advisor import yield_to_others
yield_to_others()
print(os.nice(0))
print(open("/proc/self/autogroup").read().split()[-1] if os.path.exists("/proc/self/autogroup") else "")
"""


def test_it_yields_within_its_session_and_as_a_session():
    found = subprocess.run(
        [sys.executable, "-P", "-c", CODE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
        capture_output=True,
        text=True,
        check=True,
    )
    own, session = found.stdout.split("\n")[:2]
    assert own == "19"
    assert session == ("10" if Path("/proc/self/autogroup").exists() else "")


def test_an_answer_that_takes_too_long_ends_the_process(monkeypatch):
    """Nobody reads a late answer as that to another question."""

    async def ask() -> None:
        advisor = await _AdvisorProcess.start()
        try:
            monkeypatch.setattr(replan, "SEARCH_SECONDS", 0.0)
            with pytest.raises(TimeoutError):
                await advisor.ask({"plan": {}})
            monkeypatch.setattr(replan, "SEARCH_SECONDS", 10.0)
            with pytest.raises((EOFError, ConnectionError)):
                await advisor.ask({"kind": "frontier"})
        finally:
            await advisor.close()

    asyncio.run(ask())
