"""What `vllm serve --scheduler-cls` names; only vLLM's own process imports this.

exeplan.vllm_plugin.scheduler.RraScheduler        where vLLM schedules asynchronously, its default on GPUs
exeplan.vllm_plugin.scheduler.RraSyncScheduler    where it does not, as on CPUs
"""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from exeplan.vllm_plugin.cadence import CadenceMixin


class RraScheduler(CadenceMixin, AsyncScheduler):
    """Asynchronous."""


class RraSyncScheduler(CadenceMixin, Scheduler):
    """One pass after the other."""
