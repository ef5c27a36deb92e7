"""Messages: everything that one process of exeplan sends to another, a Struct a kind and a tagged union a channel.

    front end    <-> engine process   EngineCommand,  EngineEvent    a socket pair
    front end    <-> reader           ReaderCommand,  ReaderAnswer   a socket pair
    engine       <-> worker           WorkerCommand,  WorkerEvent    a socket pair; TCP (key challenge) elsewhere
    replanner    <-> advisor          AdvisorRequest, AdvisorReply   two pipes
    front end, engine <-> fork server ForkCommand,    ForkReply      a socket pair each
    profiler     <-  rank             RankReport                     a socket pair
    front ends of other hosts: `front_end_messages.py`

A message names its kind in the field `kind`, and has exactly the fields of its Struct: with an unknown field, a missing
one or one of another type it is refused (`frames.MessageError`), and the connection with it. Times are in seconds.
Not here: what the values mean beyond their types; limits of sampling parameters, plans and models are checked by those
that use them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import asdict

from exeplan.core.batch import Chunk, Packing
from exeplan.core.profile import ReferencePass
from exeplan.core.schedule import Estimate, Schedule, Stage
from exeplan.drift.state import DriftState, Lengths, RequestLengths, Rules
from exeplan.runner.ipc.frames import Channel


class Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag=True):
    """What a frame holds."""


class Part(Struct, frozen=True, forbid_unknown_fields=True):
    """A value within messages."""


class Record(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A value that messages have many of: sent as an array, without the names of its fields."""


# Front end and engine process.


class ModelSource(Part, frozen=True):
    """A model as `exeplan.core.models.model.model_spec` reads it."""

    name: str
    directory: str | None
    """Where its weights are; None for a model without any."""
    config: Mapping[str, Any]
    """The whole Hugging Face config."""


class EngineOptions(Part, frozen=True):
    """How a plan runs its model."""

    device: str
    dtype: str
    kv_dtype: str | None
    num_blocks: int
    """KV blocks that the plan counts on."""
    dummy_weights: bool


class RaySetup(Part, frozen=True):
    """Where Ray places the workers of one pipeline."""

    address: str
    """Of the cluster, `auto` for the one that this host is part of."""
    replica: int
    started: bool = False
    """Whether the pipeline has run before: it waits for room without limit then."""
    away: int = 0
    """Workers that the pipeline had before it lost devices, and has not: it says when the cluster has room for them."""
    silent: tuple[str, ...] = ()
    """Nodes that acknowledge nothing, by Ray's ids, though Ray may take them for healthy."""


class EngineSetup(Message, frozen=True):
    """Everything that an engine must know of its plan: the first command to an engine process."""

    model: ModelSource
    schedule: Schedule
    placement: tuple[Stage, ...]
    engine: EngineOptions
    gpu_memory_utilization: float | None
    """Share of a GPU's memory that may be in use; None on a CPU, whose KV cache has the size that the plan says."""
    num_threads: int
    deadline_seconds: float
    """How long a batch may take on any stage before its workers count as hanging."""
    timeline: str | None
    """File for what runs when."""
    ray: RaySetup | None
    """None where all devices are on this host."""
    capacity: float | None = None
    """As the plan says it, for the router of several replicas."""
    reference_passes: tuple[ReferencePass, ...] = ()
    """Of the plan's profile, to be repeated while the engine works; () where the machine's speed is not watched."""
    cpu_kernels: str | None = None
    """What computed when the plan's profile was measured; None where that is not known, or not on a CPU."""


class Sampling(Part, frozen=True):
    """The fields of `exeplan.runner.compute.tokens.sampling.SamplingParams`, which checks their limits."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    logit_bias: Mapping[int, float]
    structure: str | None
    shown_token_ids: tuple[int, ...] = ()


class Prompt(Part, frozen=True):
    """A prompt and how to continue it, `n` times; sequence i of a seeded one draws from the seed plus i."""

    prompt_token_ids: list[int]
    sampling: Sampling
    n: int = 1
    deadline: float | None = None
    """Seconds from now by which it must have begun; None for no limit."""
    weight: float = 1.0


class Resumed(Part, frozen=True):
    """How far an engine before this one has come with a sequence."""

    token_ids: Sequence[int]
    """Of its output: they are not computed again, and not delivered again."""
    start: float | None
    """When its first prefill began; None where it has not."""
    crashes: int
    """How many times an engine or its workers ended while it was running."""


class Submit(Message, frozen=True):
    """Adds all sequences of a job, or none of them."""

    job: str
    stream: bool
    """False: only the first token and the whole answer are of interest, in few events."""
    prompts: Sequence[Prompt]
    request_ids: Sequence[str]
    """Of the sequences: those of the first prompt, then those of the next."""
    arrival: float
    """When the front end submitted it, by the clock of both processes."""
    resumed: Mapping[str, Resumed] | None = None
    """Only these sequences of the job, by request id, as another engine has begun it; None for all from their start."""
    begun: bool = False
    """Whether any sequence of the job has begun there: the others have no deadline to begin by then."""
    client: str = ""
    client_weight: float = 1.0
    """The client's share of the engine, relative to others."""


class Abort(Message, frozen=True):
    """Drops requests, of which some may have ended."""

    request_ids: Sequence[str]


class GetLengthStats(Message, frozen=True):
    """Asks for LengthStatsReport."""

    number: int


class SwitchPlan(Message, frozen=True):
    """Switches to the plan of that setup: answered by PlanSwitched or PlanRefused, of the same number."""

    number: int
    setup: EngineSetup


class Loading(Message, frozen=True):
    """What an engine that is not ready does; also sent while workers load again."""

    stage: str
    share: float = 0.0
    """Of the stage that is done, 0 to 1."""

    def __str__(self) -> str:
        return f"{self.stage}, {100 * self.share:.0f} %" if self.share else self.stage


def as_values(loading: Loading | None) -> dict[str, Any]:
    """Its fields by name; none where nothing loads."""
    return asdict(loading) if loading else {}


class EngineReady(Message, frozen=True):
    """The model is loaded and warm."""

    num_blocks: int
    request_tokens: int
    """Of the longest request, with its output."""


class SetupRefused(Message, frozen=True):
    """The model or plan of the setup cannot be run; the process ends."""

    message: str


class JobAdding(Message, frozen=True):
    """The job is added now: where the engine ends before its next event, that may be why."""

    job: str


class JobRefused(Message, frozen=True):
    """A request of a job is invalid, and none of the job runs."""

    job: str
    message: str
    internal: bool = False
    """Whether the engine is to blame, and not the request."""


class Logprob(Record, frozen=True, gc=False):
    """A token and its log-probability. An answer may have a million of them, all numbers, and no cycle: they, and the
    tuples in them, are none of the garbage collector's business, whose pauses would stop the server."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens with theirs, best first."""


class PromptLogprobs(Record, frozen=True):
    """Log-probabilities of all tokens of a prompt but the first, given those before: little-endian arrays."""

    num_top: int
    """Most likely tokens that are reported with each."""
    logprobs: bytes
    """float32."""
    ranks: bytes
    """int32: 1 where no token is more likely."""
    top_token_ids: bytes
    """int32, `num_top` a token, the most likely first."""
    top_logprobs: bytes
    """float32, of these."""

    @property
    def num_bytes(self) -> int:
        return len(self.logprobs) + len(self.ranks) + len(self.top_token_ids) + len(self.top_logprobs)


class Event(Record, frozen=True):
    """New tokens of one sequence. Times are seconds on the engine's clock; `text` may lag behind the tokens."""

    request_id: str
    token_ids: Sequence[int]
    text: str
    finish_reason: str | None
    first: bool
    arrival: float
    """When the request was submitted."""
    start: float
    """When its first prefill began, or when it expired."""
    time: float
    num_prompt_tokens: int
    logprobs: Sequence[Logprob] = ()
    prompt: PromptLogprobs | None = None
    """With the first token, where the request asked for them."""


class Stats(Record, frozen=True):
    """The engine after an iteration, and what that brought, which counts once: `iteration_tokens` and both counts are
    0 where nothing ran, and `slowness` where no reference pass came after it."""

    num_waiting: int = 0
    num_running: int = 0
    free_blocks: int = 0
    num_blocks: int = 0
    num_preemptions: int = 0
    """Since the report before, of this engine."""
    iteration_tokens: int = 0
    num_prefill: int = 0
    num_decode: int = 0
    slowness: float = 0.0
    """How many times as long passes take as while the profile was measured, other processes on the cores included."""
    reference_seconds: float = 0.0
    """What the reference passes took that tell it."""

    def after(self) -> "Stats":
        """The same engine without what the iteration brought."""
        return Stats(
            num_waiting=self.num_waiting,
            num_running=self.num_running,
            free_blocks=self.free_blocks,
            num_blocks=self.num_blocks,
        )


class IterationDone(Message, frozen=True):
    """What one iteration brought."""

    events: Sequence[Event]
    stats: Stats


class LengthStatsReport(Message, frozen=True):
    """Lengths of the requests that left since the last report, and of those that have begun and still run."""

    number: int
    now: float
    """On the engine's clock."""
    left: tuple[RequestLengths, ...]
    running: tuple[RequestLengths, ...]


class PlanSwitched(Message, frozen=True):
    """From here on the other plan runs."""

    number: int
    num_blocks: int
    request_tokens: int
    """As in EngineReady."""
    seconds: float
    """In which no batch was begun."""
    num_recomputed: int
    """Requests that go on without their keys and values."""
    num_carried: int
    """Requests that go on with their keys and values on other workers."""


class PlanRefused(Message, frozen=True):
    """The plan cannot be run; nothing has changed."""

    number: int
    message: str


class EngineDown(Message, frozen=True):
    """Workers died, and new ones are being started."""

    message: str


class EngineUp(Message, frozen=True):
    """The new workers are ready."""


class DevicesLeft(Message, frozen=True):
    """Workers cannot run on some devices of the placement."""

    by_node: tuple[tuple[int, ...], ...]
    """The devices that are left, those of one node together; of a Ray cluster, as many as it has room for now."""
    silent: tuple[str, ...] = ()
    """As in RaySetup."""


class DevicesBack(Message, frozen=True):
    """The cluster has room for the workers that the pipeline had before, or no longer has."""

    there: bool


class EngineBroken(Message, frozen=True):
    """An internal error; the process ends."""

    message: str
    final: bool
    """Whether another engine would not fare better."""
    left: DevicesLeft | None = None
    """Where some devices are the cause: an engine on the others would."""


class Alive(Message, frozen=True):
    """Sent now and then while there is nothing to run."""


class Begun(Message, frozen=True):
    """The first prefill of these sequences begins now, before any of it is computed."""

    request_ids: Sequence[str]
    start: float


EngineCommand: TypeAlias = EngineSetup | Submit | Abort | GetLengthStats | SwitchPlan
"""EngineSetup first, and once; until the engine is ready Loading and DevicesLeft, then EngineReady, SetupRefused or
EngineBroken."""
EngineEvent: TypeAlias = (
    Loading
    | EngineReady
    | SetupRefused
    | JobAdding
    | JobRefused
    | IterationDone
    | LengthStatsReport
    | PlanSwitched
    | PlanRefused
    | EngineDown
    | EngineUp
    | EngineBroken
    | DevicesLeft
    | DevicesBack
    | Alive
    | Begun
)
ENGINE_COMMANDS: Channel[EngineCommand] = Channel("EngineCommand", EngineCommand)
ENGINE_EVENTS: Channel[EngineEvent] = Channel("EngineEvent", EngineEvent)


# Fork server and its clients.


class Fork(Message, frozen=True):
    """Forks a process that runs `main` of a module on the socket that comes with this: answered by Forked."""

    module: str
    name: str
    """Of the process, as the system shows it: at most 15 characters."""
    forks: bool
    """Whether it gets a channel of its own to the fork server."""


class EndProcess(Message, frozen=True):
    """Kills a process that was forked over this channel, unless it ends by itself: answered by ProcessEnded."""

    pid: int
    patience: float
    """Seconds in which it may end by itself."""


class Forked(Message, frozen=True):
    """The process runs."""

    pid: int


class ProcessEnded(Message, frozen=True):
    """The process has ended."""

    status: int | None
    """Its exit status, or minus the number of its signal; None where it is not known."""


ForkCommand: TypeAlias = Fork | EndProcess
ForkReply: TypeAlias = Forked | ProcessEnded
FORK_COMMANDS: Channel[ForkCommand] = Channel("ForkCommand", ForkCommand, max_bytes=1 << 12)
FORK_REPLIES: Channel[ForkReply] = Channel("ForkReply", ForkReply, max_bytes=1 << 12)


# Front end and reader.


class ReaderSetup(Message, frozen=True):
    """The first command: answered by ReaderReady."""

    model: ModelSource
    served_name: str
    """What clients call the model."""
    sampling_defaults: Mapping[str, int | float] = {}
    """Of fields that a request leaves out, where they are not those of `SamplingParams`."""


class ReadGeneration(Message, frozen=True):
    """Answered by Generate or BodyRefused."""

    chat: bool
    body: bytes
    max_tokens: int
    """A text that is too long for any tokenization into as many is refused before it is tokenized."""


class ReadTokenize(Message, frozen=True):
    """Answered by TokensRead or BodyRefused."""

    body: bytes
    max_tokens: int


class ReadDetokenize(Message, frozen=True):
    """Answered by TextRead or BodyRefused."""

    body: bytes


class ReaderReady(Message, frozen=True):
    """The tokenizer is loaded."""


class ToolFormat(Part, frozen=True):
    """How calls of functions are found in an output."""

    name: str
    """Of a dialect in `exeplan.runner.server.openai.tool_calls`."""
    functions: tuple[str, ...]
    single: bool
    """At most one call is reported."""
    types: Mapping[str, Mapping[str, list[str]]] = {}
    """By function, the JSON types of its arguments; of formats that write arguments without their types."""


class Generate(Message, frozen=True):
    """A request for generation, its limits checked and its prompts tokenized."""

    chat: bool
    prompts: list[list[int]]
    echoes: list[str]
    """The prompts as texts, where they are to be repeated; else empty."""
    sampling: Sampling
    n: int
    stream: bool
    usage: bool
    """Of a stream: a last chunk has the usage."""
    usage_in_each_chunk: bool
    prompt_logprobs: int | None
    """vLLM's field; None where an answer has none."""
    scores_only: bool
    """The answer is the prompt alone, without the token that the engine samples in any case."""
    deadline: float | None
    weight: float
    tools: ToolFormat | None = None
    """None where an output is text only."""
    limit_is_default: bool = False
    """Whether max_tokens is lowered to what fits."""
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    """vLLM's fields."""


class TokensRead(Message, frozen=True):
    """A text as tokens."""

    token_ids: list[int]
    texts: list[str] | None
    """Of each token, where they were asked for."""


class TextRead(Message, frozen=True):
    """Tokens as a text."""

    text: str


class BodyRefused(Message, frozen=True):
    """A body that is no request; the fields of OpenAI's error object."""

    message: str
    status: int
    param: str | None
    code: str | None


ReaderCommand: TypeAlias = ReaderSetup | ReadGeneration | ReadTokenize | ReadDetokenize
ReaderAnswer: TypeAlias = ReaderReady | Generate | TokensRead | TextRead | BodyRefused
READER_COMMANDS: Channel[ReaderCommand] = Channel("ReaderCommand", ReaderCommand)
READER_ANSWERS: Channel[ReaderAnswer] = Channel("ReaderAnswer", ReaderAnswer)


# Engine and worker.


class WorkerSetup(Message, frozen=True):
    """What a worker must know: the first command to it."""

    rank: int
    setup: EngineSetup
    """`num_blocks` is what the last generation of workers had, where that was measured."""
    model_directory: str | None
    """Where the weights are on the worker's host."""
    address: str
    """Of the worker's host; it listens nowhere else."""
    local_device: int
    store: tuple[str, int]
    """Where the workers of a generation find each other: host and port."""
    prefix: str
    """Of their keys in the store."""
    buffers: Sequence[str | None]
    """By stage: shared memory in which its ranks add up; None where torch.distributed does."""
    links: dict[str, str | None]
    """By `sender-receiver`: shared memory for the hidden states between two ranks of one host."""
    logs: str | None
    """FORMAT,LEVEL of the server's logs; None without a server."""


class NewSequence(Part, frozen=True):
    """A sequence whose prefill begins: everything that a worker must know of it."""

    request_id: str
    num_prompt_tokens: int
    max_output_tokens: int
    num_output_tokens: int
    sampling: Sampling | None
    """None: the arg max of the logits."""
    seed: int
    prompt_token_ids: list[int] | None
    """What the decoder sees before the output; None where that is the beginning of `token_ids`."""
    token_ids: list[int]
    banned_token_ids: tuple[int, ...]


class PrefillSequence(Record, frozen=True):
    """A sequence that is prefilled, and the KV blocks that it holds."""

    request_id: str
    num_blocks: int


class DecodeSequence(Record, frozen=True):
    """A sequence that decodes a token, and what has changed since its last one."""

    request_id: str
    num_blocks: int
    num_output_tokens: int
    """Including a last one that may be on the devices only."""
    token_ids: Sequence[int]


class KVRegionOf(Record, frozen=True):
    """A sequence's region of host memory for keys and values (`exeplan.runner.engine.kv_regions`)."""

    request_id: str
    num_blocks: int
    start: int
    """Byte at which it begins."""
    num_tokens: int
    num_stored: int


class RunBatch(Message, frozen=True):
    """Computes a batch (`exeplan.core.batch.Batch`)."""

    number: int
    freed: Sequence[str]
    """Requests that have left, or were preempted, since the last message."""
    new: Sequence[NewSequence]
    prefill: Sequence[PrefillSequence]
    decode: Sequence[DecodeSequence]
    chunks: tuple[Chunk, ...]
    pad_to: int
    packing: Packing | None
    phase: str
    encoded: Sequence[int]
    """Earlier batches whose encoder output all stages have to take before this one."""


class ExpectKV(Message, frozen=True):
    """The keys and values of a batch, which other stages prefill, will be sent to this worker."""

    number: int
    freed: Sequence[str]
    new: Sequence[NewSequence]


class SaveKV(Message, frozen=True):
    """Copies the worker's share of keys and values into the shared memory at `path`; nothing runs meanwhile."""

    freed: Sequence[str]
    path: str
    regions: Sequence[KVRegionOf]
    encoded: Sequence[int]


class RestoreKV(Message, frozen=True):
    """Takes in sequences whose keys and values are in the shared memory at `path`."""

    freed: Sequence[str]
    path: str
    regions: Sequence[KVRegionOf]
    new: Sequence[NewSequence]


class RepeatReference(Message, frozen=True):
    """Runs the next of these reference passes with weights of its own, which are drawn at the first one."""

    passes: Sequence[ReferencePass]
    freed: Sequence[str] = ()


class WorkerLoading(Message, frozen=True):
    """How many bytes of its weights it has read."""

    num_bytes: int


class KVCapacity(Record, frozen=True):
    """What a device has memory for after its weights."""

    num_blocks: int
    pass_tokens: int
    """Tokens of the largest prefill that was tried."""


class WorkerReady(Message, frozen=True):
    """The shard is loaded, and linked to the others."""

    capacity: KVCapacity | None
    """None where nothing was measured."""


class WorkerRefused(Message, frozen=True):
    """The model cannot be loaded, for a reason that the user can change; the worker ends."""

    message: str


class WorkerFailed(Message, frozen=True):
    """An error on the worker, which ends."""

    message: str


class SampledTokenOf(Record, frozen=True):
    """The token that a batch brought a sequence; None where its logits allow none."""

    request_id: str
    token_id: int | None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    prompt: PromptLogprobs | None = None


class BatchRan(Message, frozen=True):
    """A stage has run a batch; sent by its first rank. Times are of the worker's clock."""

    number: int
    start: float
    end: float
    tokens: Sequence[SampledTokenOf] = ()
    """Of the last stage."""


class ReferenceRan(Message, frozen=True):
    """What a reference pass took on this worker, and what it cost, warming up included."""

    number: int
    """Of the passes that were asked for."""
    seconds: float
    cost: float
    others: float
    """As in `exeplan.core.runs.machine_speed.SpeedSample`."""


class KVReceived(Message, frozen=True):
    """All that this worker keeps of a batch's keys and values has arrived."""

    number: int


class KVSaved(Message, frozen=True):
    """SaveKV is done: how many tokens each region holds."""

    stored: Sequence[int]


class KVRestored(Message, frozen=True):
    """RestoreKV is done."""


WorkerCommand: TypeAlias = WorkerSetup | RunBatch | ExpectKV | SaveKV | RestoreKV | RepeatReference
"""WorkerSetup first, and once."""
WorkerEvent: TypeAlias = (
    WorkerLoading
    | WorkerReady
    | WorkerRefused
    | WorkerFailed
    | BatchRan
    | ReferenceRan
    | KVReceived
    | KVSaved
    | KVRestored
)
WORKER_COMMANDS: Channel[WorkerCommand] = Channel("WorkerCommand", WorkerCommand)
WORKER_EVENTS: Channel[WorkerEvent] = Channel("WorkerEvent", WorkerEvent)


# Replanner and advisor.


class WatchPlan(Message, frozen=True):
    """Watches a service: the first request to an advisor, answered by AdvisorReady."""

    plan: Mapping[str, Any]
    """As `exeplan.core.plan.as_json`."""
    rules: Rules
    file: str | None
    """Where proposed plans are written."""


class Look(Message, frozen=True):
    """New lengths of requests: answered by Looked."""

    now: float
    left: Sequence[RequestLengths]
    running: Sequence[RequestLengths]
    vetoed: bool
    """The last proposal was vetoed."""
    num_blocks: Sequence[int | None] = ()
    """KV blocks of the smallest engine of each group of replicas; None for a group of which none runs."""
    resumed: bool = False
    """A replica had lost devices since the last look, and has them again."""


class PlanAdopted(Message, frozen=True):
    """The service runs another plan: answered by AdvisorReady."""

    now: float
    plan: Mapping[str, Any] | int
    """Or the number of the proposal that it is of."""


class GetFrontier(Message, frozen=True):
    """Asks for FrontierRows."""


class PlanForLeft(Message, frozen=True):
    """Asks what a replica can do with the devices that it has left: answered by LeftPlanned, also before WatchPlan."""

    plan: Mapping[str, Any]
    """The service's, for all devices."""
    replica: int
    by_node: tuple[tuple[int, ...], ...]


class ProposedPlan(Part, frozen=True):
    """A plan that is better for the observed lengths."""

    number: int
    """Counts the advisor's proposals."""
    plan: Mapping[str, Any]
    reason: str
    old: Estimate | None
    new: Estimate
    """Both under the observed lengths."""
    file: str | None


class AdvisorReady(Message, frozen=True):
    """The plan is watched."""


class Looked(Message, frozen=True):
    """What a look found."""

    state: DriftState
    planned: Lengths
    observed: Lengths | None
    proposal: ProposedPlan | None
    none_better: bool = False
    """It searched and proposes nothing: what was proposed before is of no use any more."""


class FrontierRows(Message, frozen=True):
    """The frontier under the observed lengths: fields of `FrontierRow` each."""

    rows: list[dict[str, Any]]


class LeftPlanned(Message, frozen=True):
    """As `exeplan.drift.devices_left.LeftPlan`."""

    plan: Mapping[str, Any]
    missed: float
    verdict: str


class AdvisorRefused(Message, frozen=True):
    """May answer any request: files of the plan are missing, or no plan keeps the bounds."""

    message: str


AdvisorRequest: TypeAlias = WatchPlan | Look | PlanAdopted | GetFrontier | PlanForLeft
"""WatchPlan first, and once; PlanForLeft at any time."""
AdvisorReply: TypeAlias = AdvisorReady | Looked | FrontierRows | LeftPlanned | AdvisorRefused
ADVISOR_REQUESTS: Channel[AdvisorRequest] = Channel("AdvisorRequest", AdvisorRequest, max_bytes=1 << 26)
ADVISOR_REPLIES: Channel[AdvisorReply] = Channel("AdvisorReply", AdvisorReply, max_bytes=1 << 26)


# Profiler and its ranks.


class RankTimes(Message, frozen=True):
    """Seconds: by number of tokens and round, all times of one rank."""

    times: list[list[list[float]]]


class RankFailed(Message, frozen=True):
    """The rank could not be timed."""

    message: str


RankReport: TypeAlias = RankTimes | RankFailed
RANK_REPORTS: Channel[RankReport] = Channel("RankReport", RankReport)
