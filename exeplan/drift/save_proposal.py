"""Writes a plan that was made while serving, and next to it the lengths that it was made for, as a trace.

The plan names that file as its workload, so that `exeplan simulate` and `exeplan diff` work on it as on any other. The
trace is as long as the sample that the lengths are known from, and its file has a name of its own, `NEXT-lengths-` and
the lengths' fingerprint: those of an earlier plan stay as they are until `remove_lengths` is told that it is of no use.
"""

import contextlib
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from exeplan.core.plan import Plan, save_plan
from exeplan.drift.watch import Proposal
from exeplan.files import write_text
from exeplan.planner.load_problem import with_relative_references
from exeplan.workload.workload import Trace, Workload

_MOST_ROWS = 4000
"""Requests that represent an observed law."""
_LARGEST_PLAN = 1 << 18
"""Bytes of a file that may be a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """What has become of the lengths of replaced plans."""

    removed: tuple[Path, ...]
    left: tuple[Plan, ...]
    """Plans whose lengths are still there, those that cannot be removed included."""


def save_proposal(proposal: Proposal, path: Path) -> Plan:
    """Writes the lengths, then the plan, so that a plan on disk is complete. Returns the plan with its references."""
    sample = Trace(*proposal.workload.sample(min(_MOST_ROWS, round(proposal.size)), seed=0))
    found = Workload.of_trace("lengths", sample).fingerprint
    lengths = path.with_name(f"{_prefix(path)}{found}.csv")
    rows = "\n".join(f"{i},{o}" for i, o in zip(sample.inputs.tolist(), sample.outputs.tolist(), strict=True))
    write_text(lengths, f"input_tokens,output_tokens\n{rows}\n")
    named = replace(proposal.plan, workload=str(lengths), workload_fingerprint=found, fit_context=False)
    save_plan(with_relative_references(named, path), path)
    return named


def was_saved(plan: Plan, path: Path) -> bool:
    """Whether the plan of this file was written there by `save_proposal`, and not by hand."""
    return Path(plan.workload or "").name.startswith(_prefix(path))


def remove_lengths(replaced: Sequence[Plan], kept: Iterable[Plan], path: Path) -> Cleared:
    """Removes the lengths of plans that were saved at `path`, replaced there, and will not be adopted.

    What one of the `kept` plans names stays, and so does what a file in that folder names, such as a copy of the plan.
    """
    removed: list[Path] = []
    named = {_file(plan) for plan in kept}
    if written := {file for plan in replaced if (file := _file(plan)) not in named and file}:
        for lengths in _unnamed(written, path.resolve().parent):
            with contextlib.suppress(OSError):
                lengths.unlink()
                removed.append(lengths)
    left = tuple(plan for plan in replaced if (file := _file(plan)) and _may_be_there(file))
    return Cleared(removed=tuple(removed), left=left)


def same_lengths(plan: Plan, other: Plan) -> bool:
    """Whether both name the same file."""
    return _file(plan) == _file(other)


def _prefix(path: Path) -> str:
    """What the names of the lengths of plans that are saved there begin with."""
    return f"{path.stem}-lengths-"


def _file(plan: Plan) -> Path | None:
    return Path(plan.workload).resolve() if plan.workload else None


def _unnamed(written: Collection[Path], folder: Path) -> list[Path]:
    """The lengths that no file of the folder names; none where it cannot be listed."""
    try:
        files = [file for file in folder.iterdir() if os.path.isfile(file) and file.suffix != ".csv"]
    except OSError:
        return []
    texts = [_text(file) for file in files]
    # The fingerprint alone is looked for, however a plan writes the name before it.
    return [file for file in sorted(written) if not any(file.name.rpartition("-")[2] in text for text in texts)]


def _may_be_there(file: Path) -> bool:
    try:
        file.stat()
    except FileNotFoundError:
        return False
    except OSError:  # Its folder does not say.
        return True
    return True


def _text(file: Path) -> str:
    """Of a file that may be a plan; empty for others."""
    try:
        return file.read_text(encoding="utf-8", errors="replace") if file.stat().st_size <= _LARGEST_PLAN else ""
    except OSError:
        return ""
