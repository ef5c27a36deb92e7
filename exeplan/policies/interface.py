"""What a policy module offers, and what it sees: Policy, State, Knob, Cycle, Steady; Clock and Queue.

Not here: the lookup by name (`exeplan/policies/__init__.py`), and the scheduler behind `Queue`
(`exeplan/scheduling/scheduler.py`).
"""

from collections import abc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Protocol, cast

from exeplan.arrays import Floats
from exeplan.core.batch import Batch, SequenceState
from exeplan.core.schedule import Schedule
from exeplan.workload.length_law import Ints, LengthLaw
from exeplan.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class Knob:
    """A control variable and its values, ordered so that throughput and latency both rise along them."""

    name: str
    values: tuple[int, ...]
    falls: float = 0.0
    """How far, relative, throughput and latency may yet fall on the way up, as far as is known: of falls that are not
    declared the search finds only those that it meets."""
    first: int = 0
    """Position of the value from which both rise. Below it latency may rise again on the way down, so that a search
    looks there only for schedules that keep limits which this one breaks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """The passes that repeat under a schedule, as expectations, one array entry a pass.

    A pass is one micro-batch on its way through the stages. Prompts enter as a law, not as a mean: a pass that
    prefills `num_prefill[i]` requests prefills that many draws from `prompt_law`. A policy may add passes that take no
    part in the throughput to time what its latency needs, such as an iteration observed by a request that is certainly
    resident.
    """

    num_prefill: Floats
    """Requests prefilled in the pass, given that it occurs."""
    num_decode: Floats
    """Rows that decode, given that it occurs."""
    context_tokens: Floats
    """Tokens already in the KV cache, summed over the decode rows, given that it occurs."""
    prompt_law: LengthLaw
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
    num_prefill_servers: int
    """Equal pipelines among which the stages that prefill are divided, in order; mostly 1."""

    def seconds(self, cycle: Cycle) -> Floats:
        """Seconds of each pass on each stage, [stages, passes], given that it occurs; the send to the next included.

        Of n servers of a phase, an n-th on each stage: so many passes go on side by side.
        """

    def kv_transfer_seconds(self, num_tokens: float) -> float:
        """From the end of a prefill until the keys and values of `num_tokens` tokens are at the stages that decode."""


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """Requests that came at a rate, one array entry each, all equally likely; seconds."""

    waits: Floats
    """Until its prefill begins."""
    prefills: Floats
    """From then on until its prefill is done."""
    paces: Floats
    """Of a decode iteration of its batch."""
    outputs: Ints
    """Output tokens."""
    kv_tokens: Floats
    """Tokens in the KV cache when its batch is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """A schedule's steady state under a backlog, timed."""

    cycle: Cycle
    seconds: Floats
    """Of each pass of the cycle on each stage, [stages, passes]."""
    throughput: float
    """Requests a second."""
    latency: Callable[[Floats], Floats]
    """Seconds from the start of its prefill until a request has that number of tokens, elementwise."""
    admission_interval: float | None = None
    """Seconds between two admissions, as an arriving request meets them, more often the long ones; None where it is
    the time to serve the requests that start together."""
    first: Callable[[Floats, Floats], Floats] | None = None
    """Seconds until the first token of a request with that many input tokens and an even draw between 0 and 1 for what
    it meets, elementwise; None where it differs from the mean by what the prompts of its prefill take."""
    arriving: "Callable[[float], tuple[tuple[Schedule, Steady], ...]] | None" = None
    """Steady states when requests come at a rate, with rising numbers that begin together, each with its schedule; None
    where those of smaller batches under a backlog stand for them."""
    served: "Callable[[float, float], Served] | None" = None
    """What requests meet that come at a rate, with gaps of a squared coefficient of variation; of a policy whose next
    batch depends on the lengths that wait. None where it follows from the steady states of smaller batches."""


class Queue(Protocol):
    """What a policy sees of the scheduler: requests by state, and room in the KV cache. Nothing here can be set.

    `rebalance`, `add_ready_to_group` and `move_to_group` are all that a policy may do to it.
    """

    @property
    def waiting(self) -> Collection[SequenceState]:
        """In order of arrival, preempted requests first."""

    @property
    def running(self) -> abc.Sequence[SequenceState]:
        """Admitted, oldest first."""

    @property
    def groups(self) -> abc.Sequence[abc.Sequence[SequenceState]]:
        """Running requests by the micro-batch in which they decode, oldest first but for those moved to it."""

    @property
    def ready(self) -> abc.Sequence[SequenceState]:
        """Prefilled on stages of their own and in no group yet, oldest first."""

    @property
    def busy(self) -> abc.Set[int]:
        """Groups in flight."""

    @property
    def group_order(self) -> abc.Sequence[int]:
        """All groups, the least recently scheduled first."""

    @property
    def free_blocks(self) -> int:
        """KV blocks that no request holds."""

    @property
    def num_prefills_in_flight(self) -> int:
        """Batches in flight that prefill."""

    @property
    def num_in_transfer(self) -> int:
        """Requests admitted to the stages that prefill, and not ready yet."""

    @property
    def num_prefill_stages(self) -> int:
        """Stages that prefill."""

    @property
    def num_decode_stages(self) -> int:
        """Stages that decode: the same ones, unless some are set apart for it."""

    @property
    def whole_prompts(self) -> bool:
        """No prompt can be cut, because an encoder attends to all of it at once."""

    @property
    def pass_tokens(self) -> int | None:
        """Tokens that the device's memory can prefill at once; None where nothing limits them."""

    def admissible(
        self, limit: int, *, reserve: bool = False, max_tokens: int | None = None
    ) -> tuple[SequenceState, ...]:
        """The first waiting requests, in the schedule's order, that fit into the free blocks: at most `limit`."""

    def first_waiting(self, limit: int) -> tuple[SequenceState, ...]:
        """The first `limit` waiting requests in the schedule's order, whether they fit or not."""

    def fitting(
        self, sequences: Iterable[SequenceState], *, limit: int, reserve: bool = False, max_tokens: int | None = None
    ) -> tuple[SequenceState, ...]:
        """The first of these waiting requests that fit into the free blocks: at most `limit`."""

    def rebalance(self, in_order: Iterable[SequenceState] = ()) -> None:
        """Splits the running requests into groups of nearly equal size; none may be in flight.

        They are dealt out; those of `in_order` that run still fill the groups up, the first ones the first group.
        """

    def add_ready_to_group(self, group: int, limit: int) -> None:
        """Puts the oldest `ready` requests into a group, at most `limit`."""

    def move_to_group(self, sequence: SequenceState, group: int) -> None:
        """Puts a request of a group into another, in front; its own may not be in flight."""


class State(Protocol):
    """What a policy remembers between two batches. The scheduler keeps it, reads nothing of it, and tells it this.

    A scheduler has one from `Policy.start`, and a plan switch begins with a new one.
    """

    def began(self, batch: Batch, times: int) -> None:
        """The batch was scheduled so often in a row: this batch first, or once more."""

    def drained(self) -> None:
        """The last running request has left."""


class Stateless:
    """The State of a policy that remembers nothing: the Queue says all that it needs."""

    def began(self, batch: Batch, times: int) -> None:
        pass

    def drained(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLimits:
    """The largest pass that a schedule allows; None where the schedule sets no limit."""

    decode_rows: int | None
    """Rows that decode in one pass, over all micro-batches."""
    prompts: int | None
    """Prompts prefilled in one pass."""
    tokens: int | None = None
    """Tokens of one pass, where the scheduling itself keeps to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBetween:
    """The most that is prefilled between two tokens of a request that decodes: what it waits for."""

    prompts: int
    """Of all micro-batches together; 0 where none is prefilled meanwhile on the stages that decode."""
    tokens: int | None = None
    """Of one pass, decode rows included; None where the schedule sets no limit."""
    cuts: bool = False
    """Prompts are cut at that limit; otherwise a longer one runs in a pass of its own."""
    passes: int = 1
    """Among which the prompts are divided."""
    apart: bool = False
    """They run before the request's own pass, not in it: with a limit on the tokens of a pass in as many passes as that
    takes, no fewer than `passes`."""
    in_turn: bool = False
    """Of those apart each group has its own, one when the one before has left the last stage; otherwise they follow
    each other from stage to stage."""


class Policy(Protocol):
    """What a policy module defines."""

    KEEPS_FINISHED_ROWS: bool
    """Finished rows stay in the batch until all of it is finished (static batching)."""
    SEPARATE_STAGES: bool
    """Some stages only prefill, the others only decode."""
    PADS_PROMPTS: bool
    """All prompts of a batch are computed at the length of its longest, or of a row."""
    FOR_DEADLINES: bool
    """Batches run to completion, so that their choice matters under deadlines: without deadlines `auto` leaves the
    policy out, because others serve more at every bound."""
    ENGINE: str
    """The engine whose own order of work it is: `auto` tries it for that engine alone. A policy may leave this out."""
    ALIKE_TOGETHER: bool
    """Requests of like lengths go together. Of a sample that covers both lengths evenly its batches are more even than
    chance makes them, so that its requests are drawn at random. A policy may leave this out."""
    RESERVES: bool
    """A request takes KV blocks for its whole output when it begins, so that none is preempted: outputs without a limit
    of their own leave room for few. A policy may leave this out, which says no."""
    SPLIT_BY: str
    """How many GPUs prefill where stages are separate: in proportion to `time`, or so that `memory` is even."""

    def check(self, schedule: Schedule) -> None:
        """Raises InputError unless the schedule has exactly this policy's control variables, in range."""

    def knobs(self, workload: Workload, max_seqs: int) -> tuple[Knob, ...]:
        """The control variables that trade throughput for latency; with at most `max_seqs` residents.

        The first one is the batch size: where requests come at a rate, batches smaller than it occur.
        """

    def enumerated(self, num_stages: int) -> tuple[Mapping[str, int], ...]:
        """Values of the other variables, which the search tries one by one: micro-batches on a pipeline of
        `num_stages`, tokens a pass, and others whose best value depends on the device more than on the bound."""

    def schedule(self, variables: Mapping[str, int], workload: Workload) -> Schedule:
        """The schedule of a point of the search: variables that follow from the others filled in.

        A policy from outside the package may give it any policy name: its own replaces that.
        """

    def pass_limits(self, schedule: Schedule) -> PassLimits:
        """The largest pass that the schedule allows: what an engine measures, captures and keeps memory for."""

    def starts_together(self, schedule: Schedule) -> int:
        """Requests whose prefills start together; a run needs many times as many for a reliable mean."""

    def steady_state(self, schedule: Schedule, workload: Workload, clock: Clock) -> Steady:
        """The steady state under a backlog, on the clock's stages."""

    def start(self, schedule: Schedule, num_groups: int) -> State:
        """The state before the first batch; `Stateless()` for a policy that has none."""

    def next_batch(self, schedule: Schedule, queue: Queue, state: State, phase: str) -> Batch | None:
        """What to run now on the first of the stages that do `phase` ('' where all stages do everything)."""

    def prefill_between_tokens(self, schedule: Schedule) -> PrefillBetween:
        """What a request that decodes may wait for between two tokens. A policy may leave this out, which says all that
        a pass may prefill, in its own pass.
        """

    def token_limits(self) -> Sequence[int]:
        """Values of `max_num_batched_tokens`, of a policy that can do without it: the search tries them where the time
        between two tokens is bounded. A policy without that variable, or always with it, leaves this out.
        """

    def groups_used(self, schedule: Schedule, num_requests: int, num_stages: int) -> int:
        """Micro-batches among which so many requests are spread, while there are fewer than the schedule has room for.
        A policy may leave this out, which says all.
        """

    def enlarged(self, schedule: Schedule, workload: Workload, factor: float) -> Sequence[Schedule]:
        """Schedules like this one with prefills of so many times the requests, of a policy that has dynamic workload
        adjustment (ExeGPT section 5.2): with it they may keep a bound. A policy without it leaves this out.
        """

    def repeats(self, schedule: Schedule, queue: Queue, state: State) -> float:
        """How many more times the decode batch that has just begun follows itself, whatever waits, where one group runs
        everything: until a request arrives or has its last token, and at most that often. It spares a replay the
        asking. A policy may leave this out, which says never while requests wait.
        """


def missing_members(module: ModuleType) -> tuple[str, ...]:
    """What a module lacks to be a policy. `SPLIT_BY` matters with separate stages only, some functions never."""
    optional = {"ALIKE_TOGETHER", "ENGINE", "RESERVES", "enlarged", "groups_used", "prefill_between_tokens", "repeats"}
    optional |= {"token_limits"} if getattr(module, "SEPARATE_STAGES", False) else {"token_limits", "SPLIT_BY"}
    return tuple(name for name in _members() if name not in optional and not hasattr(module, name))


def named(module: ModuleType, name: str) -> Policy:
    """The policy of a module from outside the package; its schedules carry the name under which it was loaded."""

    def schedule(variables: Mapping[str, int], workload: Workload) -> Schedule:
        return replace(module.schedule(variables, workload), policy=name)

    members = {member: getattr(module, member) for member in _members() if hasattr(module, member)}
    return cast(Policy, SimpleNamespace(**{**members, "schedule": schedule}))


def _members() -> tuple[str, ...]:
    functions = (name for name, value in vars(Policy).items() if callable(value) and not name.startswith("_"))
    return (*Policy.__annotations__, *functions)
