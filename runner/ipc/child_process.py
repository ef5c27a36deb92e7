"""A child process that runs a module of this package, in a session of its own: a terminal's signals are not for it."""

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import Any


async def start_child(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None, **options: Any
) -> asyncio.subprocess.Process:
    """Starts it; `environment` is added to this process's, `options` are asyncio's. Raises OSError where it cannot.

    It looks modules up where this process does, and not in the working directory.
    """
    paths = os.pathsep.join(filter(None, sys.path))
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", module, *arguments),
        env={**os.environ, "PYTHONPATH": paths, **(environment or {})},
        start_new_session=True,
        **options,
    )
