"""Messages of front ends on other hosts than the engines, as `messages.py` has those of one host.

    owner of the replicas <-> front end on another host      OwnerMessage,  FrontEndMessage   TCP (key challenge)
    owner of the replicas <-> process that places front ends PlacerCommand, PlacerReply       a socket pair

Not here: what the values mean beyond their types (`runner/server/front_ends`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from exeplan.runner.ipc.frames import Channel
from exeplan.runner.ipc.messages import Event, Loading, Message, ModelSource, Part, Prompt, Stats

# The owner of the replicas and a front end on another host.


class FrontEndOptions(Part, frozen=True):
    """Of `ServeOptions`, what a front end on another host needs; files are read there."""

    host: str
    port: int
    api_key: str | None
    api_keys: str | None
    cors_origins: tuple[str, ...]
    allowed_hosts: tuple[str, ...]
    trusted_proxies: tuple[str, ...]
    tls_cert: str | None
    tls_key: str | None
    max_queue: int
    admission: str
    request_seconds: float
    drain_seconds: float
    model_name: str
    metrics_aliases: str | None
    sampling_defaults: Mapping[str, int | float]
    log_format: str
    log_level: str


class FrontEndSetup(Message, frozen=True):
    """The first message to a front end: answered by FrontEndListens or FrontEndRefused."""

    address: str
    """Of its node, as Ray knows it."""
    plan: Mapping[str, Any]
    """As `exeplan.core.plan.as_json`."""
    model: ModelSource
    options: FrontEndOptions


class ServiceState(Message, frozen=True):
    """How the replicas are, several times a second: answered by FrontEndState."""

    failure: str | None
    pause: str | None
    long_pause: str | None
    unready: str | None
    stall: str | None
    loading: Loading | None
    draining: bool
    """The whole service ends; running requests are finished."""
    num_waiting: int
    """Sequences of all front ends."""
    serving: Sequence[int] | None
    """Numbers of the replicas that do; None where there is one engine."""
    num_blocks: int
    request_tokens: int
    """Of the longest request, with its output; 0 until the replicas are ready."""
    stats: Stats


class PlanRuns(Message, frozen=True):
    """The replicas run another plan."""

    plan: Mapping[str, Any]


class ReadFilesAgain(Message, frozen=True):
    """API keys and certificates may have changed."""


class JobEvents(Message, frozen=True):
    """New tokens of a job, with the front end's names of its sequences."""

    job: str
    events: Sequence[Event]


class JobEnded(Message, frozen=True):
    """A job is refused or given up; the fields of OpenAI's error object."""

    job: str
    message: str
    status: int
    param: str | None
    code: str | None
    retry_after: int | None


class OwnerAnswer(Message, frozen=True):
    """The response to AskOwner."""

    number: int
    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


class FrontEndListens(Message, frozen=True):
    """It answers requests, at this URL."""

    url: str


class FrontEndRefused(Message, frozen=True):
    """It cannot start, and ends."""

    message: str


class FrontEndState(Message, frozen=True):
    """What the owner has to know of a front end."""

    draining: bool
    num_pending: int
    """Requests that have been received and not answered."""
    num_refused: int
    """Requests that it has refused by itself for want of room, since its start."""


class SubmitJob(Message, frozen=True):
    """A request that a front end has read: admitted, or refused by JobEnded."""

    job: str
    client: str
    """Whose it is, by `Client.identity`."""
    prompts: Sequence[Prompt]
    stream: bool


class LeaveJob(Message, frozen=True):
    """Nothing more is wanted of a job, which may have ended."""

    job: str


class AskOwner(Message, frozen=True):
    """An HTTP request that only the owner can answer."""

    number: int
    method: str
    path: str
    body: bytes
    client: str
    """Whose it is, by `Client.identity`."""


FrontEndMessage: TypeAlias = FrontEndListens | FrontEndRefused | FrontEndState | SubmitJob | LeaveJob | AskOwner
OwnerMessage: TypeAlias = FrontEndSetup | ServiceState | PlanRuns | ReadFilesAgain | JobEvents | JobEnded | OwnerAnswer
FRONT_END_MESSAGES: Channel[FrontEndMessage] = Channel("FrontEndMessage", FrontEndMessage)
OWNER_MESSAGES: Channel[OwnerMessage] = Channel("OwnerMessage", OwnerMessage)


# The owner of the replicas and the process that places front ends.


class PlaceFrontEnds(Message, frozen=True):
    """The first command: one front end each on that many nodes other than this host."""

    address: str
    """Of the Ray cluster."""
    count: int
    model: ModelSource
    fingerprint: str


class FrontEndLost(Message, frozen=True):
    """A front end's connection has ended: another one takes its place."""

    number: int


class FrontEndPlaced(Message, frozen=True):
    """A front end waits for its setup; its connection comes with this message."""

    number: int
    address: str
    """Of its node."""
    model_directory: str | None


class PlacingRefused(Message, frozen=True):
    """Nothing can be placed."""

    message: str


PlacerCommand: TypeAlias = PlaceFrontEnds | FrontEndLost
PlacerReply: TypeAlias = FrontEndPlaced | PlacingRefused
PLACER_COMMANDS: Channel[PlacerCommand] = Channel("PlacerCommand", PlacerCommand)
PLACER_REPLIES: Channel[PlacerReply] = Channel("PlacerReply", PlacerReply)
