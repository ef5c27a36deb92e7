"""AdvisorProcess: the server's side of an advisor process (`advisor.py`): its two pipes, and one question at a time.

Not here: what is asked, and what a reply leads to (`replanner.py`, `devices.py`).
"""

import asyncio
import contextlib

from exeplan.runner.ipc.child_process import start_child
from exeplan.runner.ipc.frames import frame
from exeplan.runner.ipc.messages import ADVISOR_REPLIES, AdvisorReply, AdvisorRequest

URGENT = "--urgent"
SEARCH_SECONDS = 300.0
"""How long the advisor may take for a reply; then it is ended."""


class AdvisorProcess:
    """A process that has been started."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self._asking = process, asyncio.Lock()

    @classmethod
    async def start(cls, *, urgent: bool = False) -> "AdvisorProcess":
        """An `urgent` one does not yield to others: requests wait for its answer."""
        pipe, threads = asyncio.subprocess.PIPE, {"OMP_NUM_THREADS": "1"}
        options = [URGENT] if urgent else []
        module = "exeplan.runner.replan.advisor"
        return cls(await start_child(module, *options, environment=threads, stdin=pipe, stdout=pipe))

    async def ask(self, request: AdvisorRequest) -> AdvisorReply:
        """The reply. Raises TimeoutError where it takes too long, EOFError where the process has ended."""
        async with self._asking:
            assert self._process.stdin
            assert self._process.stdout
            self._process.stdin.write(frame(request))
            try:
                async with asyncio.timeout(SEARCH_SECONDS):
                    return await ADVISOR_REPLIES.read_from(self._process.stdout)
            except TimeoutError:  # A late reply would be taken for the next one.
                await self.close()
                raise

    async def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
