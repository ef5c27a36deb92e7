"""A profile at several numbers of threads a process, each measured on its own and kept in one file.

Not here: what is measured (`profile_model.py`), and which number a plan takes (`exeplan/planner/threads.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from exeplan.core.models.model import ModelSpec
from exeplan.core.profile import Profile, load_profile, save_profile
from exeplan.errors import InputError
from exeplan.profiler.profile_model import profile_model


def parse_threads(text: str) -> tuple[int, ...]:
    """`1,2` as numbers, the first one that of the devices. Raises InputError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise InputError(f"--threads must be at least 1, a number or several such as 1,2, found '{text}'")
    counts = tuple(map(int, parts))
    if len(set(counts)) < len(counts):
        raise InputError(f"--threads names a number twice: {text}")
    return counts


def profile_thread_counts(
    spec: ModelSpec,
    counts: Sequence[int],
    *,
    output: Path,
    budget_seconds: float,
    num_devices: int = 1,
    **options: Any,
) -> Profile:
    """Measures the model with each number of threads, on as many devices as have the cores of `num_devices` of the
    first number, in an equal share of the budget; writes one profile. `options` are those of `profile_model`."""
    paths = [output, *(output.with_name(f"{output.name}.{count}-threads") for count in counts[1:])]
    found = [
        profile_model(
            spec,
            output=path,
            budget_seconds=budget_seconds / len(counts),
            num_threads=count,
            num_devices=max(num_devices * counts[0] // count, 1),
            complete=len(counts) == 1,
            **options,
        )
        for path, count in zip(paths, counts, strict=True)
    ]
    if len(counts) == 1:
        return found[0]
    # Only now: a number that is interrupted is resumed with those before it, of which no file is a finished profile.
    first, *more = (replace(one, complete=True) for one in found)
    save_profile(replace(first, more_threads=tuple(more)), output)
    for path in paths[1:]:
        path.unlink()
    return load_profile(output)
