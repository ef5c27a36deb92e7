"""A child process that runs a module of this package, in a session of its own: a terminal's signals are not for it."""

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WATCH_SECONDS = 0.2
"""Between two looks at a process."""
STOPPED_SECONDS = 0.5
"""How long a process may be stopped by a signal before it counts as lost."""


async def start_child(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None, **options: Any
) -> asyncio.subprocess.Process:
    """Starts it; `environment` is added to this process's, `options` are asyncio's. Raises OSError where it cannot."""
    command, variables = child_command(module, *arguments, environment=environment)
    return await asyncio.create_subprocess_exec(*command, env=variables, start_new_session=True, **options)


def child_command(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of a child, which looks modules up where this process does, and not in the
    working directory."""
    paths = os.pathsep.join(filter(None, sys.path))
    return (
        [sys.executable, "-P", "-m", module, *arguments],
        {**os.environ, "PYTHONPATH": paths, **(environment or {})},
    )


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process; False where the system does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except OSError:
        return False
