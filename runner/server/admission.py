"""Admission: which requests are admitted, according to the plan.

The queue is bounded; in addition a request may be refused early because it would be late. Its wait is the number of
sequences ahead in the queue over what the replicas that serve now do with full batches by the plan, as there is a
queue. Its own time is what the plan predicts for a prefill and the requested output tokens, at most for an output of
the length that the bound is on.
Not here: what a request may ask for (`protocol`).
"""

import math
from collections.abc import Callable, Sequence

from exeplan.core.bounds import targets_of
from exeplan.core.plan import Plan
from exeplan.core.schedule import Estimate
from exeplan.errors import InputError
from exeplan.runner.server.observation.observed import bounds_of
from exeplan.runner.server.openai.errors import RequestError

MAX_RETRY_SECONDS = 60


class Admission:
    """The rules of one plan. `max_queue` counts sequences whose prefill has not begun."""

    def __init__(self, plan: Plan, *, max_queue: int, refuse_late: bool) -> None:
        self.max_queue, self.refuse_late = max_queue, refuse_late
        self.serving: Callable[[], Sequence[int] | None] = lambda: None
        """Numbers of the replicas that serve now; None where they are always the plan's."""
        self.adopt(plan)

    def check(self, plan: Plan) -> None:
        """Raises InputError where late requests are to be refused and the plan cannot tell which these are."""
        bounds = bounds_of(plan)
        if self.refuse_late and not (bounds and (plan.replay or plan.estimate)):
            lacks = "an estimate; `exeplan simulate` adds one" if bounds else "a bound; give `exeplan optimize` one"
            raise InputError(f"--admission refuse-late needs the plan's predictions, but the plan lacks {lacks}")
        if self.refuse_late and plan.full_throughput is None:
            raise InputError(
                "--admission refuse-late needs what the plan serves with full batches, but the plan, for a rate, lacks "
                "its capacity; `exeplan simulate` adds it to a plan of equal replicas"
            )

    def adopt(self, plan: Plan) -> None:
        """Follows this plan from now on. Raises as `check`."""
        self.check(plan)
        self._bounds = bounds_of(plan)
        self._estimate: Estimate | None = plan.replay or plan.estimate
        self._planned = plan.full_throughput or (self._estimate.throughput if self._estimate else 0.0)
        capacities = [group.capacity for group in plan.groups for _ in group.first_devices]
        known = [one for one in capacities if one]
        self._shares = known if len(known) == len(capacities) else [1.0] * len(capacities)
        """Of each replica in the plan's throughput, up to a factor."""

    @property
    def _throughput(self) -> float:
        """What serves now, in requests/s; of at least one replica."""
        if (serving := self.serving()) is None:
            return self._planned
        shares = self._shares
        now = sum(shares[number] if number < len(shares) else shares[0] for number in serving or (0,))
        return self._planned * now / sum(shares)

    def wait(self, num_waiting: int) -> float:
        """Seconds until a request that arrives now begins, as predicted; 0 for a plan without a throughput, and at most
        so many for one for a rate that lacks its capacity."""
        throughput = self._throughput
        return num_waiting / throughput if throughput > 0 else 0.0

    def retry_after(self, num_waiting: int) -> int:
        """Whole seconds until the waiting sequences have begun, as predicted, 1 to 60."""
        return _retry(self.wait(num_waiting))

    def refusal(
        self,
        count: int,
        *,
        num_waiting: int,
        max_tokens: int | None,
        deadline: float | None = None,
        num_before: int | None = None,
    ) -> RequestError | None:
        """Why a request of `count` sequences is not admitted now; None when it is.

        `deadline` is the request's own: seconds from now by which it must have begun. Of those that wait `num_before`
        start before it; None for all of them.
        """
        if count > self.max_queue:
            return RequestError(f"{count} sequences in one request, the queue holds {self.max_queue}", param="n")
        if num_waiting + count > self.max_queue:
            message = f"{num_waiting} sequences are waiting, the queue holds {self.max_queue}; try again later"
            return RequestError(message, status=429, code="queue_full", retry_after=self.retry_after(num_waiting))
        num_ahead = (num_waiting if num_before is None else num_before) + count - 1
        late = self._late(num_ahead, max_tokens) if self.refuse_late else 0.0
        if self.refuse_late and deadline is not None:
            late = max(late, self.wait(num_ahead) - deadline)
        if late > 0:
            message = f"{num_waiting} sequences are waiting; this request would be {late:.3g} s late"
            return RequestError(message, status=429, code="late", retry_after=_retry(late))
        return None

    def _late(self, num_ahead: int, max_tokens: int | None) -> float:
        """Seconds by which the request would exceed its bounds, at most; 0 or less when it keeps them."""
        estimate, wait = self._estimate, self.wait(num_ahead)
        if estimate is None or wait == 0.0:
            return 0.0
        longest = estimate.latency if estimate.latency is not None else estimate.latency_p99
        own = longest if max_tokens is None else min(longest, estimate.ttft + (max_tokens - 1) * estimate.tpot)
        takes = {"ttft": estimate.ttft, "tpot": -math.inf}
        held = targets_of(self._bounds)
        return max((wait + takes.get(quantity, own) - seconds for quantity, seconds in held), default=0.0)


def default_max_queue(plan: Plan) -> int:
    """Four times the plan's running sequences (by Little's law, where it does not state them), and at least 64."""
    running = plan.max_seqs or 0
    if plan.estimate and not running:
        running = math.ceil(plan.estimate.throughput * plan.estimate.latency_p50)
    return max(64, 4 * running)


def _retry(seconds: float) -> int:
    return min(max(math.ceil(seconds), 1), MAX_RETRY_SECONDS)
