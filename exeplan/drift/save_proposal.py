"""Writes a plan that was made while serving, and next to it the lengths that it was made for, as a trace.

The plan names that file as its workload, so that `exeplan simulate` and `exeplan diff` work on it as on any other. The
trace is as long as the sample that the lengths are known from, and its file has a name of its own, `NEXT-lengths-` and
the lengths' fingerprint: those of an earlier plan stay as they are.
"""

from dataclasses import replace
from pathlib import Path

from exeplan.core.plan import Plan, save_plan
from exeplan.drift.watch import Proposal
from exeplan.files import write_text
from exeplan.planner.load_problem import with_relative_references
from exeplan.workload.workload import Trace, Workload

_MOST_ROWS = 4000
"""Requests that represent an observed law."""


def save_proposal(proposal: Proposal, path: Path) -> Plan:
    """Writes the lengths, then the plan, so that a plan on disk is complete. Returns the plan with its references."""
    sample = Trace(*proposal.workload.sample(min(_MOST_ROWS, round(proposal.size)), seed=0))
    found = Workload.of_trace("lengths", sample).fingerprint
    lengths = path.with_name(f"{path.stem}-lengths-{found}.csv")
    rows = "\n".join(f"{i},{o}" for i, o in zip(sample.inputs.tolist(), sample.outputs.tolist(), strict=True))
    write_text(lengths, f"input_tokens,output_tokens\n{rows}\n")
    named = replace(proposal.plan, workload=str(lengths), workload_fingerprint=found, fit_context=False)
    save_plan(with_relative_references(named, path), path)
    return named
