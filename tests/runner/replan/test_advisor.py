"""The advisor yields the processors, also where they are shared out by session; late replies are not mixed up."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from exeplan.runner.ipc.frames import frame
from exeplan.runner.ipc.messages import AdvisorReady, GetFrontier
from exeplan.runner.replan import advisor_process
from exeplan.runner.replan.advisor_process import AdvisorProcess

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


def test_a_reply_that_takes_too_long_ends_the_process(monkeypatch):
    """A late reply is not read as that to another request."""

    async def ask() -> None:
        advisor = await AdvisorProcess.start()
        try:
            monkeypatch.setattr(advisor_process, "SEARCH_SECONDS", 0.0)
            with pytest.raises(TimeoutError):
                await advisor.ask(GetFrontier())
            monkeypatch.setattr(advisor_process, "SEARCH_SECONDS", 10.0)
            with pytest.raises((EOFError, ConnectionError)):
                await advisor.ask(GetFrontier())
        finally:
            await advisor.close()

    asyncio.run(ask())


def test_something_else_than_a_request_ends_the_process_with_a_sentence():
    found = subprocess.run(
        [sys.executable, "-P", "-m", "exeplan.runner.replan.advisor"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        input=frame(AdvisorReady()),
        start_new_session=True,
        capture_output=True,
        check=False,
    )
    assert (found.returncode, found.stdout) == (1, b"")
    assert found.stderr.startswith(b"exeplan.replan: a message of 19 bytes does not fit AdvisorRequest: ")
