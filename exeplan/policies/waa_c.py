"""Workload-aware allocation with the GPUs split by computation: WAA-C.

Source: ExeGPT (ASPLOS 2024) sections 4.1, 4.2 and 6. The planner gives the stages that prefill and those that decode so
many GPUs that prefilling and decoding take equal time. What both kinds do is in `_waa`.
"""

from collections.abc import Mapping

from exeplan.core.schedule import Schedule
from exeplan.policies._variables import fillings
from exeplan.policies._waa import check, completed, knobs, next_batch, start, starts_together
from exeplan.policies._waa_steady import steady_state
from exeplan.workload.workload import Workload

KEEPS_FINISHED_ROWS = False
SEPARATE_STAGES = True
PADS_PROMPTS = False
FOR_DEADLINES = False
SPLIT_BY = "time"

__all__ = ["check", "fillings", "knobs", "next_batch", "schedule", "start", "starts_together", "steady_state"]


def schedule(variables: Mapping[str, int], workload: Workload) -> Schedule:
    """The schedule with these control variables; the prefill batch follows from the decode batch."""
    return Schedule("waa-c", completed(variables, workload))
