"""Writes a plan that was made while serving, and next to it the lengths that it was made for, as a trace.

The plan names that file as its workload, so that `exeplan simulate` and `exeplan diff` work on it as on any other.
"""

from dataclasses import replace
from pathlib import Path

from exeplan.core.plan import Plan, save_plan
from exeplan.files import write_text
from exeplan.planner.load_problem import with_relative_references
from exeplan.workload.workload import Workload

_ROWS = 4000
"""Requests that represent an observed law."""


def save_proposal(plan: Plan, workload: Workload, path: Path) -> Plan:
    """Writes the lengths, then the plan, so that a plan on disk is complete. Returns the plan with its references."""
    lengths = path.with_name(f"{path.stem}-lengths.csv")
    inputs, outputs = workload.sample(_ROWS, seed=0)
    rows = "\n".join(f"{i},{o}" for i, o in zip(inputs.tolist(), outputs.tolist(), strict=True))
    write_text(lengths, f"input_tokens,output_tokens\n{rows}\n")
    # The file holds a sample, whose fingerprint differs from the law's.
    named = replace(plan, workload=str(lengths), workload_fingerprint=None, fit_context=False)
    save_plan(with_relative_references(named, path), path)
    return named
