"""Policies: how work is ordered. One file each, found by its name; nobody else compares policy names.

A policy module offers what `Policy` lists: what the search may turn, its steady state for the closed form, and what
runs next for the replay and the runner. Adding a policy is adding a file here (and its test); `exeplan.policies.<name>`
becomes `--policy <name>`, underscores read as hyphens. A file whose name starts with an underscore is no policy: it
holds what two policies share.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from exeplan.errors import InputError
from exeplan.orders import ETA, ORDERS, Das

if TYPE_CHECKING:
    from exeplan.length_law import LengthLaw
    from exeplan.plan import Schedule
    from exeplan.scheduling import Batch, Scheduler
    from exeplan.workload import Workload

Floats = NDArray[np.float64]

ORDER_VARIABLES = ("eta_percent", "q_percent", "lead_ms")
"""What any schedule may say of its order: the parameters of DAS, and how long before its deadline a request has to
start at the latest."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A control variable and its values, ordered so that throughput and latency both rise along them."""

    name: str
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """The steady state of a schedule: the passes that repeat, as expectations, one array entry a pass.

    A pass is one micro-batch on its way through the stages. Prompts enter as a law, not as a mean: a pass that
    prefills `num_prefill[i]` requests prefills that many draws from `prompt_law`. A policy may add passes that take no
    part in the throughput to time what its latency needs, such as an iteration seen by a request that is certainly on
    board.
    """

    num_prefill: Floats
    """Requests prefilled in the pass, given that it occurs."""
    num_decode: Floats
    """Rows that decode, given that it occurs."""
    context_tokens: Floats
    """Tokens already in the KV cache, summed over the decode rows, given that it occurs."""
    prompt_law: "LengthLaw"
    padded: bool = False
    """All prompts of a pass are padded to one length, and `prompt_law` is the law of that length."""
    packed_slots: float = 0.0
    """Slots in which the prompts of a pass with prefills are packed, each computed like one of `prompt_law`."""
    prompt_tokens: Floats | None = None
    """Prompt tokens of the pass where they are known, as when prompts are cut: `num_prefill` counts the cut ones, too,
    and in all every token of a prompt from `prompt_law` is prefilled once."""
    prompt_attention: Floats | None = None
    """Seconds of the attention of these tokens over what they are in the mean: the end of a prompt attends to more."""
    kv_tokens: float
    """Peak over the cycle of the mean number of tokens in the KV cache."""
    kv_tokens_std: float
    """Standard deviation of that number, over independent requests."""
    num_seqs: float
    """Peak over the cycle of the mean number of residents."""
    prefill_kv_tokens: float = 0.0
    """Tokens in the KV cache of stages that only prefill."""


class Clock(Protocol):
    """Times the passes of a cycle on a pipeline of stages (the simulator's cost model)."""

    first_token_from_prefill: bool
    """The prefill yields the first token, so that a request of S tokens needs S - 1 decode iterations."""
    prefill_stages: tuple[int, ...]
    """Stages that prefill: all of them, unless some are set apart for it."""
    decode_stages: tuple[int, ...]

    def seconds(self, cycle: Cycle) -> Floats:
        """Seconds of each pass on each stage, [stages, passes], given that it occurs; the send to the next included."""

    def handover_seconds(self, num_tokens: float) -> float:
        """To move the keys and values of so many tokens from the stages that prefill to those that decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """A schedule's steady state under a backlog, timed."""

    cycle: Cycle
    seconds: Floats
    """Of each pass of the cycle on each stage, [stages, passes]."""
    throughput: float
    """Requests a second."""
    latency: Callable[[Floats], Floats]
    """Seconds from the start of its prefill until a request has so many tokens, elementwise."""
    turn: float | None = None
    """Seconds between two admissions; None where that is the time it takes to serve those who start together."""


class Policy(Protocol):
    """What a policy module defines."""

    KEEPS_FINISHED_ROWS: bool
    """Finished rows stay in the batch until all of it is finished (static batching)."""
    SEPARATE_STAGES: bool
    """Some stages only prefill, the others only decode."""
    PADS_PROMPTS: bool
    """All prompts of a batch are computed at the length of its longest, or of a row."""
    FOR_DEADLINES: bool
    """Batches run to completion so that who is chosen for one counts: where requests have no deadlines, `auto` leaves
    the policy out, because others serve more at every bound."""
    SPLIT_BY: str
    """How many GPUs prefill where stages are separate: in proportion to `time`, or as few as the `memory` needs."""

    def check(self, schedule: "Schedule") -> None:
        """Raises InputError unless the schedule has exactly this policy's control variables, in range."""

    def knobs(self, workload: "Workload", max_seqs: int) -> tuple[Knob, ...]:
        """The control variables that trade throughput for latency; nothing may hold more than `max_seqs` residents.

        The first one says how large the batches may become: where requests come at a rate, it is what stays unfilled.
        """

    def fillings(self, num_stages: int) -> tuple[Mapping[str, int], ...]:
        """Values of the other variables: how micro-batches fill a pipeline of so many stages, tried one by one."""

    def schedule(self, variables: Mapping[str, int], workload: "Workload") -> "Schedule":
        """The schedule of a point of the search: variables that follow from the others filled in."""

    def starts_together(self, schedule: "Schedule") -> int:
        """Requests whose prefills belong together; a run holds many times that to say something about the mean."""

    def steady_state(self, schedule: "Schedule", workload: "Workload", clock: Clock) -> Steady:
        """The steady state under a backlog, on the clock's stages."""

    def next_batch(self, schedule: "Schedule", state: "Scheduler", phase: str) -> "Batch | None":
        """What to run now on the first of the stages that do `phase` ('' where all stages do everything)."""


@cache
def load_policy(name: str) -> Policy:
    """The policy of that name. Raises InputError listing what there is."""
    if name not in policy_names():
        raise InputError(f"no policy '{name}'; there are {', '.join(policy_names())}")
    return cast(Policy, importlib.import_module(f"exeplan.policies.{name.replace('-', '_')}"))


@cache
def policy_names() -> tuple[str, ...]:
    """All policies, sorted."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(name.replace("_", "-") for name in names if not name.startswith("_")))


def require(
    schedule: "Schedule", *names: str, optional: tuple[str, ...] = ("micro_batches",), orders: tuple[str, ...] = ORDERS
) -> None:
    """Raises InputError unless the schedule's control variables are these, each a positive integer, and its order is
    one of these.

    An optional one may be missing, and is 1 then; so may those of the order.
    """
    policy, values = schedule.policy, schedule.variables
    if not set(names) <= set(values) <= {*names, *optional, *ORDER_VARIABLES}:
        found = ", ".join(sorted(values)) or "none"
        raise InputError(f"policy {policy} takes the control variables {', '.join(names)}; found {found}")
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{policy}: {name} must be a positive integer, found {value!r}")
    if schedule.order not in orders:
        raise InputError(f"{policy}: order must be one of {', '.join(orders)}, found {schedule.order!r}")
    for name in {"eta_percent", "q_percent"} & set(values):
        if "das" not in schedule.order:
            raise InputError(f"{policy}: {name} is about the order das, found order {schedule.order}")
        if values[name] > 99:
            raise InputError(f"{policy}: {name} must lie between 1 and 99, found {values[name]}")


def das_of(schedule: "Schedule") -> Das:
    """The parameters of DAS; q is 1 - eta unless it is given."""
    eta = schedule.variables.get("eta_percent", round(100 * ETA))
    return Das(eta=eta / 100, q=schedule.variables.get("q_percent", 100 - eta) / 100)


def micro_batch_counts(num_stages: int) -> tuple[int, ...]:
    """Micro-batch counts worth trying: half as many as stages, as many, and twice as many.

    Fewer leave stages idle without making a pass shorter, more make passes small: a quarter as many and four times as
    many were never better (`benchmarks/micro_batches.py`).
    """
    return tuple(sorted({max(1, num_stages // 2), num_stages, 2 * num_stages}))


def fillings(num_stages: int) -> tuple[Mapping[str, int], ...]:
    """The fillings of a policy whose only such variable is the number of micro-batches."""
    if num_stages == 1:
        return ({},)
    return tuple({"micro_batches": count} for count in micro_batch_counts(num_stages))


def micro_batches(schedule: "Schedule") -> int:
    return schedule.variables.get("micro_batches", 1)


def slot_share(total: int, parts: int, part: int) -> int:
    """The part's share of slots dealt out one by one."""
    return total // parts + (part < total % parts)
