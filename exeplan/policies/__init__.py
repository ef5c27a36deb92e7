"""Policies: how work is ordered. One file each, found by its name; nobody else compares policy names.

A policy module offers what `Policy` lists: what the search may turn, its steady state for the closed form, and what
runs next for the replay and the runner. Adding a policy is adding a file here (and its test); `exeplan.policies.<name>`
becomes `--policy <name>`, underscores read as hyphens.
"""

import importlib
import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from exeplan.errors import InputError

if TYPE_CHECKING:
    from exeplan.length_law import LengthLaw
    from exeplan.plan import Schedule
    from exeplan.scheduling import Batch, Scheduler
    from exeplan.workload import Workload

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Knob:
    """A control variable and its values, ordered so that throughput and latency both rise along them."""

    name: str
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """The steady state of a schedule: the passes that repeat, as expectations, one array entry a pass.

    Prompts enter as a law, not as a mean: a pass that prefills `num_prefill[i]` requests prefills that many draws from
    `prompt_law`. Passes of probability 0 take no part in the throughput; a policy adds them to time what its `latency`
    needs, such as an iteration seen by a request that is certainly on board.
    """

    completions: float
    """Requests finished in one cycle."""
    probability: Floats
    """How often the pass occurs in a cycle: below 1 where a batch may have run empty, above 1 never."""
    num_prefill: Floats
    """Requests prefilled in the pass, given that it occurs."""
    num_decode: Floats
    """Rows that decode, given that it occurs."""
    context_tokens: Floats
    """Tokens already in the KV cache, summed over the decode rows, given that it occurs."""
    prompt_law: "LengthLaw"
    padded: bool = False
    """All prompts of a pass are padded to one length, and `prompt_law` is the law of that length."""
    kv_tokens: float
    """Peak over the cycle of the mean number of tokens in the KV cache."""
    kv_tokens_std: float
    """Standard deviation of that number, over independent requests."""
    num_seqs: float
    """Peak over the cycle of the mean number of residents."""


class Policy(Protocol):
    """What a policy module defines."""

    KEEPS_FINISHED_ROWS: bool
    """Finished rows stay in the batch until all of it is finished (static batching)."""

    def check(self, schedule: "Schedule") -> None:
        """Raises InputError unless the schedule has exactly this policy's control variables, in range."""

    def knobs(self, workload: "Workload", max_seqs: int) -> tuple[Knob, ...]:
        """The control variables and their ranges; nothing may hold more than `max_seqs` residents."""

    def cycle(self, schedule: "Schedule", workload: "Workload") -> Cycle:
        """The steady state under a backlog."""

    def latency(self, schedule: "Schedule", cycle: Cycle, pass_seconds: Floats, output_tokens: Floats) -> Floats:
        """Seconds from the start of its prefill until a request has `output_tokens` tokens, elementwise.

        `pass_seconds[i]` is the time of the cycle's i-th pass, given that it occurs.
        """

    def next_batch(self, schedule: "Schedule", state: "Scheduler") -> "Batch | None":
        """What to run now."""


def load_policy(name: str) -> Policy:
    """The policy of that name. Raises InputError listing what there is."""
    if name not in policy_names():
        raise InputError(f"no policy '{name}'; there are {', '.join(policy_names())}")
    return cast(Policy, importlib.import_module(f"exeplan.policies.{name.replace('-', '_')}"))


def policy_names() -> list[str]:
    """All policies, sorted."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))


def require(schedule: "Schedule", *names: str) -> None:
    """Raises InputError unless the schedule's control variables are exactly these, each a positive integer."""
    policy, values = schedule.policy, schedule.variables
    if set(values) != set(names):
        found = ", ".join(sorted(values)) or "none"
        raise InputError(f"policy {policy} takes the control variables {', '.join(names)}; found {found}")
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{policy}: {name} must be a positive integer, found {value!r}")
