"""Workload-aware allocation with the GPUs split by memory: WAA-M.

Source: ExeGPT (ASPLOS 2024) sections 4.1, 4.2 and 6. The planner divides the GPUs between the stages that prefill and
those that decode so that both kinds of stages use an equal share of their memory, which depends on the batches: from as
few as hold the weights, where caches fill the others, to half of them. The schedule itself is in `shared/waa.py`.
"""

from collections.abc import Mapping

from exeplan.core.control_variables import micro_batchings
from exeplan.core.schedule import Schedule
from exeplan.policies.shared import waa as _waa
from exeplan.policies.shared import waa_steady as _waa_steady
from exeplan.workload.workload import Workload

KEEPS_FINISHED_ROWS = False
SEPARATE_STAGES = True
PADS_PROMPTS = False
FOR_DEADLINES = False
SPLIT_BY = "memory"

check = _waa.check
knobs = _waa.knobs
enumerated = micro_batchings
pass_limits = _waa.pass_limits
prefill_between_tokens = _waa.prefill_between_tokens
starts_together = _waa.starts_together
steady_state = _waa_steady.steady_state
start = _waa.start
enlarged = _waa.enlarged
next_batch = _waa.next_batch


def schedule(variables: Mapping[str, int], workload: Workload) -> Schedule:
    """The schedule with these control variables; the prefill batch follows from the decode batch."""
    return Schedule("waa-m", _waa.completed(variables, workload))
