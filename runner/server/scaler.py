"""Scaler: looks at the load every second and has the engine's replicas follow it, by the rule of the replay.

Not here: the rule (`exeplan/scheduling/scaling.py`), and how a replica starts and drains
(`runner/engine_process/replicas.py`).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from exeplan.core.plan import Plan
from exeplan.errors import InputError
from exeplan.planner.rate_curve import rate_curve
from exeplan.runner.engine_process.replicas import ReplicaSet
from exeplan.scheduling.scaling import LOOK_SECONDS, Demand, RateCurve, ScalingRule, look

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Between which the number of replicas follows the load."""

    least: int
    most: int
    curve: RateCurve
    basis: str
    """What the curve is from."""


def limits_of(plan: Plan, replicas: tuple[int, int], *, on_ray: bool) -> Limits:
    """Raises InputError where the plan has no devices for so many, or says nothing of what a replica serves."""
    least, most = replicas
    if most > plan.num_replicas and not on_ray:
        raise InputError(
            f"--replicas {least}:{most} needs {most} replicas on this host, the plan has devices for "
            f"{plan.num_replicas}; list the first device of each in its `replicas`, or use --ray"
        )
    if most > plan.num_replicas and plan.more_replicas:
        raise InputError(
            f"the plan's replicas differ, and it has {plan.num_replicas}; --replicas may name at most those"
        )
    curve, basis = rate_curve(plan, most)
    return Limits(least, most, curve, basis)


class Scaler:
    """The number of replicas over time."""

    def __init__(self, engine: ReplicaSet, limits: Limits, *, num_refused: Callable[[], int]) -> None:
        """`num_refused` counts the sequences that came and got no place for want of room."""
        self._engine, self._limits, self._num_refused = engine, limits, num_refused
        self._demand = Demand(wanted=limits.least)
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to look, once the first replicas serve."""
        known = self._limits
        log.info(
            "%d to %d replicas follow the load: one serves %.3g requests/s, %s",
            known.least,
            known.most,
            known.curve.rates[0],
            known.basis,
        )
        self._looking = asyncio.create_task(self._look())

    async def close(self) -> None:
        """Looks no more; replicas stay as they are."""
        if self._looking:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    def reading(self) -> Mapping[str, float]:
        """For metrics, by name."""
        return {
            "replicas_wanted": self._demand.wanted,
            "replicas_needed": self._demand.share,
            "replicas_serving": self._engine.num_serving,
            "replicas_starting": self._engine.num_starting,
            "replicas_draining": self._engine.num_draining,
            "arrival_rate": self._demand.rate,
        }

    async def _look(self) -> None:
        while True:
            engine, before = self._engine, self._demand.wanted
            rule = ScalingRule(
                curve=self._limits.curve,
                least=self._limits.least,
                most=self._limits.most,
                start_seconds=engine.start_seconds,
            )
            self._demand = look(
                rule,
                self._demand,
                now=time.monotonic(),
                num_arrived=engine.num_reserved + self._num_refused(),
                num_waiting=engine.num_waiting,
            )
            if self._demand.wanted != before:
                log.info(
                    "%d replicas are wanted instead of %d: %.3g requests/s come, %d wait",
                    self._demand.wanted,
                    before,
                    self._demand.rate,
                    engine.num_waiting,
                )
            engine.scale_to(self._demand.wanted)
            await asyncio.sleep(LOOK_SECONDS)
