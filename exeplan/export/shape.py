"""What the exporters of several engines ask of a plan: where its replicas are, how its layers are cut, how long its
queue may be, and what none of these engines does."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from exeplan.core.cluster import load_cluster
from exeplan.core.models.model import FP8, ModelSpec, load_model_sizes
from exeplan.core.pass_memory import LargestPasses, passes_bytes
from exeplan.core.plan import Plan
from exeplan.core.schedule import Placement, ReplicaGroup, Schedule, servers
from exeplan.errors import InputError
from exeplan.export.interface import Instance, Join
from exeplan.workload.arrivals import with_spare_places

_USUAL_TOKENS = 16_384
"""Of a prefill pass: the most that one of these engines has by default."""
_GIB = 1 << 30
Words = Callable[[ReplicaGroup], tuple[Sequence[str], Mapping[str, str]]]
"""The options and the environment of a group's servers."""


def instances_of(
    plan: Plan, engine: str, program: tuple[str, ...], words: Words, join: Join | None = None
) -> tuple[Instance, ...]:
    """One for each group of equal replicas. Raises InputError for a pipeline on several hosts without a way to `join`
    them."""
    names = [engine] if len(plan.groups) == 1 else [f"{engine}-{number}" for number in range(len(plan.groups))]
    found = []
    for group, name in zip(plan.groups, names, strict=True):
        options, environment = words(group)
        instance = Instance(
            name=name, program=program, options=tuple(options), environment=environment, hosts=(), gpus=()
        )
        found.append(_where(plan, instance, engine, group.placements, join))
    return tuple(found)


def _where(plan: Plan, instance: Instance, engine: str, placements: Sequence[Placement], join: Join | None) -> Instance:
    """The instance with servers on these placements."""
    placed = [placed_on(plan, one, engine=engine, joins=join is not None) for one in placements]
    num_hosts = placed[0].num_hosts
    return replace(
        instance,
        hosts=tuple(one.host for one in placed),
        gpus=tuple(one.gpus for one in placed),
        num_hosts=num_hosts,
        join=join if num_hosts > 1 else None,
    )


def apart(plan: Plan) -> bool:
    """Whether servers only prefill or only decode."""
    return any(stage.phase for group in plan.groups for stage in group.placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The equal servers of a group that only prefill, or only decode."""

    phase: str
    server: Placement
    """The first of them."""
    schedule: Schedule
    count: int
    """In each replica of the group."""
    kv_cache_tokens: int | None
    """Of each server that decodes, which the requests of all have to fit."""

    @property
    def rows(self) -> int:
        """Requests that one server decodes at once, or that it prefills in a pass."""
        if self.phase == "prefill":
            return self.schedule["prefill_batch"]
        return math.ceil(self.schedule["decode_batch"] / self.count)


SideWords = Callable[[Side], tuple[Sequence[str], Mapping[str, str]]]
"""The options and the environment of its servers."""


def sides_of(plan: Plan, engine: str, program: tuple[str, ...], words: SideWords, join: Join) -> tuple[Instance, ...]:
    """Two for each group of equal replicas: its servers that prefill, and those that decode."""
    found = []
    for number, group in enumerate(plan.groups):
        for phase in ("prefill", "decode"):
            name = f"{engine}-{phase}" if len(plan.groups) == 1 else f"{engine}-{number}-{phase}"
            instance, placements = _side(group, phase, name, program, words)
            found.append(_where(plan, instance, engine, placements, join))
    return tuple(found)


def _side(
    group: ReplicaGroup, phase: str, name: str, program: tuple[str, ...], words: SideWords
) -> tuple[Instance, list[Placement]]:
    numbers = servers(group.placement, phase)
    side = Side(
        phase=phase,
        server=tuple(group.placement[number] for number in numbers[0]),
        schedule=group.schedule,
        count=len(numbers),
        kv_cache_tokens=group.kv_cache_tokens
        and math.ceil(group.kv_cache_tokens / len(servers(group.placement, "decode"))),
    )
    options, environment = words(side)
    own = [tuple(placement[i] for i in stages) for placement in group.placements for stages in numbers]
    instance = Instance(
        name=name,
        program=program,
        options=tuple(options),
        environment=environment,
        hosts=(),
        gpus=(),
        phase=phase,
    )
    return instance, own


def check_sides(plan: Plan, spec: ModelSpec, engine: str) -> None:
    """Raises InputError for what the engine's servers of one phase cannot be."""
    if plan.device == "cpu":
        raise InputError(f"{engine} hands keys and values over between GPUs, the plan is for a CPU")
    if not all(any(stage.phase for stage in group.placement) for group in plan.groups):
        raise InputError(
            "some of the plan's replicas have servers for each phase and others do not; plan with --arrival-rate or "
            "--one-pipeline, whose replicas are equal, or with one --policy"
        )
    for group in plan.groups:
        for phase in ("prefill", "decode"):
            numbers = servers(group.placement, phase)
            if max(map(len, numbers)) > 1:
                raise InputError(
                    f"the plan has {len(numbers[0])} stages in a row that {phase}; exported are servers with all "
                    f"layers on each: plan with times of {engine}, by --engine"
                )
            sharding = group.placement[numbers[0][0]].sharding
            if sharding.data_parallel_size > 1:
                raise InputError(f"attention data parallelism is not exported to servers of {engine} that {phase} yet")
        sizes = [group.placement[servers(group.placement, phase)[0][0]].num_devices for phase in ("prefill", "decode")]
        if max(sizes) % min(sizes):
            raise InputError(
                f"{engine} hands keys and values over between tensor-parallel sizes of which one divides the other, "
                f"and the plan has {sizes[0]} and {sizes[1]}"
            )


def pass_tokens(side: Side, longest: int, usual: int) -> int:
    """Tokens of a prefill server's pass: the plan's budget, or what an engine has by default, for the prompts of a
    batch."""
    return max(1, min(side.rows * longest, side.schedule.variables.get("prefill_tokens", usual)))


def option_value(words: Sequence[str], option: str) -> int:
    return int(words[words.index(option) + 1])


def handover_remarks(plan: Plan, engine: str, tokens: int, holds: str) -> Iterator[str]:
    """What servers of each phase do otherwise than the plan; `tokens` are the most of a prefill pass, and `holds` says
    whether the engine holds prefills back."""
    yield (
        "keys and values are handed over by NIXL; the plan counts on the links of its cluster, so hosts need RDMA "
        "devices that the servers may use: over TCP first tokens come later"
    )
    if plan.cluster and not placed_together(plan):
        yield "host-N stands for the address of the plan's host N"
    yield f"the plan holds prefills back while prefilled requests wait for a place; {holds}"
    yield f"a prefill pass of {engine} has at most {tokens} tokens"
    yield from unlimited_remark(plan)
    for group in plan.groups:
        if "adjust_percent" in group.schedule.variables:
            yield f"the plan adjusts the number of prefills to their work; {engine}'s is only limited"
        if group.schedule.order != "fcfs":
            yield f"the plan's queue is in the order {group.schedule.order}; {engine}'s is first come, first served"


def placed_together(plan: Plan) -> bool:
    """Whether all GPUs of a plan are on one host."""
    each = load_cluster(plan.cluster).gpus_per_node if plan.cluster else math.inf
    devices = {d for group in plan.groups for one in group.placements for stage in one for d in stage.devices}
    return len({device // each for device in devices}) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where one server is."""

    host: int
    """The first of its hosts, which are in a row."""
    num_hosts: int
    gpus: tuple[int, ...]
    """On each of them, by its own numbers; none on a CPU."""


def placed_on(plan: Plan, placement: Placement, *, engine: str, joins: bool) -> Placed:
    """Where a replica is.

    Raises InputError for one on several hosts where no server of the engine `joins` others, or where the hosts have
    unequal parts of it.
    """
    if plan.device == "cpu":
        return Placed(host=0, num_hosts=1, gpus=())
    devices = [device for stage in placement for device in stage.devices]
    each = load_cluster(plan.cluster).gpus_per_node if plan.cluster else max(devices) + 1
    hosts = sorted({device // each for device in devices})
    if len(hosts) > 1 and not joins:
        raise InputError(
            f"the plan's pipeline is on {len(hosts)} hosts; exported to {engine} are servers within one: plan with as "
            f"many GPUs as a host has ({each}), which are replicas on more hosts"
        )
    own = {host: tuple(sorted(device % each for device in devices if device // each == host)) for host in hosts}
    if len(hosts) > 1 and (devices != sorted(devices) or len(set(own.values())) > 1):
        raise InputError(
            f"the plan's pipeline has unequal parts on its {len(hosts)} hosts; {engine} counts GPUs host by host, so "
            "that each must have as many, in the order of the stages"
        )
    return Placed(host=hosts[0], num_hosts=len(hosts), gpus=own[hosts[0]])


def check_shape(plan: Plan, spec: ModelSpec, engine: str, policies: Sequence[str], *, apart: bool = False) -> None:
    """Raises InputError for what the engine cannot run at all; `apart`: servers of one phase may be there."""
    if spec.is_encoder_decoder:
        raise InputError(f"{engine} does not serve encoder-decoder models such as {spec.name}")
    again = f"plan again with --policy {' or '.join(policies)}"
    for group in plan.groups:
        if not apart and any(stage.phase for stage in group.placement):
            raise InputError(f"the plan has stages that only prefill, which are not exported to {engine} yet; {again}")
        if group.schedule.policy not in policies:
            raise InputError(f"{engine} cannot schedule as '{group.schedule.policy}' does; {again}")
        if not apart and len({stage.sharding for stage in group.placement}) > 1:
            raise InputError(f"{engine} has one tensor-parallel size for all stages, the plan's stages have several")


def check_one_stage(plan: Plan, engine: str) -> None:
    """Raises InputError for what engines without pipelines, on GPUs and in 16 bits, cannot run."""
    if plan.device == "cpu":
        raise InputError(f"{engine} runs on no CPU")
    if plan.dtype == "float32":
        raise InputError(f"{engine} computes in float16 or bfloat16, the plan in float32; profile in one of these")
    for group in plan.groups:
        if len(group.placement) > 1:
            raise InputError(f"{engine} has no pipeline parallelism; plan with fewer GPUs, as replicas of one stage")
        if group.placement[0].data_parallel_size > 1 or group.placement[0].expert_parallel_size > 1:
            raise InputError(f"attention data parallelism and expert parallelism are not exported to {engine} yet")


def is_quantized(plan: Plan, spec: ModelSpec, model: str) -> bool | None:
    """Whether the checkpoint that an engine loads by this name has quantized weights; None where nothing on this
    machine says so."""
    if model == plan.model:
        return spec.quantization is not None
    try:
        return load_model_sizes(model).quantization is not None
    except InputError:  # Of the Hub, and not in the cache.
        return True if "fp8" in model.lower() else None


def quantizes(plan: Plan, spec: ModelSpec, model: str) -> bool:
    """Whether an engine has to quantize weights to fp8 as it loads them; unknown ones are taken to be the plan's."""
    held = is_quantized(plan, spec, model)
    return plan.dtype == FP8 and not (spec.quantization if held is None else held)


def weight_remarks(plan: Plan, spec: ModelSpec, model: str, engine: str, option: str) -> Iterator[str]:
    """What a plan in fp8 asks of the checkpoint; `option` quantizes its weights, which few engines do twice."""
    if plan.dtype != FP8 or (held := is_quantized(plan, spec, model)):
        return
    if held is not None:
        yield f"{engine} quantizes the weights of {model}, which are in 16 bits, to fp8 as it loads them"
    elif spec.quantization:
        yield f"the weights of {model} are taken to be in fp8; if they are in 16 bits, add {option}"
    else:
        yield f"the weights of {model} are taken to be in 16 bits; if they are quantized already, leave out {option}"


def without_adjustment(group: ReplicaGroup) -> Schedule:
    """Round-robin allocation with a constant number of prefills."""
    variables = group.schedule.variables
    return Schedule("rra", {name: value for name, value in variables.items() if name != "adjust_percent"})


def layer_partition(placement: Placement, own: Callable[[int, int], Sequence[int]]) -> str:
    """The layers of each stage with commas; '' where the engine's `own` split, of layers over stages, is that."""
    counts = [stage.layers[1] - stage.layers[0] for stage in placement]
    return ",".join(map(str, counts)) if len(counts) > 1 and counts != list(own(sum(counts), len(counts))) else ""


def in_flight_limit(plan: Plan) -> int | None:
    """Requests that one server may have, queued ones included, before the bound on latency breaks; None without one.

    Source: Little's law, with as many requests always in flight: batches are full, and each request is answered after
    that many over what they serve a second.
    """
    throughput = plan.full_throughput
    if throughput is None or plan.bound is None or plan.bound.seconds == float("inf"):
        return None
    return max(int(throughput * plan.bound.seconds / plan.num_replicas), 1)


def unlimited_remark(plan: Plan) -> Iterator[str]:
    """Of a plan for a rate whose bound gives no limit, as its figures do not say what a server could serve."""
    if plan.bound and math.isfinite(plan.bound.seconds) and plan.has_arrivals and plan.full_throughput is None:
        yield (
            "the plan does not say what its replicas serve with full batches (capacity), so its bound gives no limit "
            "on the queue; `exeplan simulate` adds that to a plan of equal replicas"
        )


def queue_remark(plan: Plan, engine: str) -> Iterator[str]:
    """Of an engine without an option that would keep the bound."""
    if limit := in_flight_limit(plan):
        yield f"{engine}'s queue has no limit; more than {limit} requests in flight break the plan's bound"


def router_limit(plan: Plan) -> tuple[str, ...]:
    """Options of both engines' routers, none without a bound: a bucket of as many tokens as requests may be in flight,
    which is refilled with as many a second by default, and with one at least."""
    if (limit := in_flight_limit(plan)) is None:
        return ()
    count = f"{limit * plan.num_replicas}"
    return ("--max-concurrent-requests", count, "--rate-limit-tokens-per-second", "1", "--queue-size", "0")


def refill_remark(plan: Plan, router: str) -> Iterator[str]:
    """What that is short of a limit on requests in flight."""
    if in_flight_limit(plan):
        yield (
            f"while it refuses requests, {router} lets in one a second more than are answered (the least that "
            "--rate-limit-tokens-per-second takes): a long overload breaks the plan's bound"
        )


def most_rows(plan: Plan, group: ReplicaGroup) -> int | None:
    """Requests of one server of an `rra` plan that run after a prefill, in the mean; None where nothing says so. At a
    rate with places for bursts: the mean of those that are there, full batches are seldom, and chance exceeds it often.

    Engines that prefill as many requests as they have places then prefill as many as the plan does, in the mean. Those
    that decode, by the plan's `decode_batch` or, of equal replicas, by Little's law, are fewer by half a prefill: the
    batch shrinks by one prefill until the next.
    """
    variables, found = group.schedule.variables, plan.replay or plan.estimate
    if (decoding := variables.get("decode_batch")) is None:
        if found is None or len(plan.groups) > 1:
            return None
        decoding = round(found.token_throughput * found.tpot / plan.num_replicas)
        decoding = with_spare_places(max(decoding, 1)) if plan.has_arrivals else decoding
    return decoding + math.ceil(variables["prefill_batch"] / 2)


def prefill_tokens(plan: Plan, group: ReplicaGroup) -> int | None:
    """Tokens of a prefill of an `rra` plan, of all its prompts: engines decode again after one pass, so that what does
    not fit waits for the next prefill. The plan's budget, or what so many prompts hardly ever exceed; None where
    nothing says how long they are."""
    variables, stall = group.schedule.variables, plan.longest_stall
    if budget := variables.get("max_num_batched_tokens"):
        return budget
    if not stall.get("num_prompts"):
        return None
    tokens = math.ceil(variables["prefill_batch"] * stall["num_tokens"] / stall["num_prompts"])
    return min(tokens, group.kv_cache_tokens or tokens)


def prefill_remarks(plan: Plan, spec: ModelSpec, engine: str, option: str) -> Iterator[str]:
    """What the prefills of an `rra` plan ask of an engine, whose `option` is the limit on the tokens of a pass."""
    for group in plan.groups:
        if group.schedule.policy != "rra":
            continue
        tokens = prefill_tokens(plan, group)
        if tokens is None:
            yield (
                f"nothing says how long prompts are; where those of a prefill exceed {option}, {engine} prefills fewer "
                "at a time than planned"
            )
        elif tokens > _USUAL_TOKENS and plan.device != "cpu":
            passes = LargestPasses(tokens=of_each(tokens, group.placement), rows=1, captured_rows=1)
            held = passes_bytes(spec, plan.dtype or "bfloat16", passes, group.placement[0].sharding, last=False)
            yield (
                f"a prefill of the plan has up to {tokens} tokens, whose activations take about {held / _GIB:.1f} GiB"
                f"{'' if plan.dtype else ' in bfloat16'} of each GPU on top of weights and KV cache; where {engine} "
                "lacks them, plan with a bound by --itl, which makes prefills smaller"
            )


def of_each(count: int, placement: Placement) -> int:
    """A batch of each rank: those of a plan are of all ranks together."""
    return -(-count // placement[0].data_parallel_size)


def longest_request(spec: ModelSpec, group: ReplicaGroup) -> int:
    """Tokens: no more than the cache holds."""
    return min(spec.max_context, group.kv_cache_tokens or spec.max_context)


def with_schedules(plan: Plan, own: Callable[[ReplicaGroup], Schedule]) -> Plan | None:
    """The plan with each group's schedule as an engine has it; None where these are the plan's own."""
    first, *others = (replace(group, schedule=own(group)) for group in plan.groups)
    found = replace(plan, schedule=first.schedule, more_replicas=tuple(others))
    return found if found.groups != plan.groups else None


def common_remarks(plan: Plan, engine: str, cached: str) -> Iterator[str]:
    """What holds for all of these engines; `cached` is what an engine calls the reuse of common beginnings."""
    for group in plan.groups:
        variables, stages = group.schedule.variables, len(group.placement)
        if group.schedule.order != "fcfs":
            yield f"the plan's queue is in the order {group.schedule.order}; {engine}'s is first come, first served"
        if variables.get("micro_batches", 1) not in (1, stages):
            yield f"the plan has {variables['micro_batches']} micro-batches on {stages} stages, {engine} one a stage"
    if plan.num_replicas > 1:
        yield (
            f"{plan.num_replicas} servers need a router in front of them that sends a request to the one with the "
            f"fewest (the plan's router is {plan.router or 'shortest-queue'})"
        )
    if not placed_together(plan) and plan.device != "cpu":
        yield from _hosts_remarks(plan)
    yield from unlimited_remark(plan)
    yield cache_remark(cached)


def _hosts_remarks(plan: Plan) -> Iterator[str]:
    if any(placed_on(plan, one, engine="", joins=True).num_hosts > 1 for g in plan.groups for one in g.placements):
        yield "host-N stands for the address of the plan's host N, whose processes are one server"


def cache_remark(cached: str) -> str:
    return f"{cached} is off, as plans count every prompt token; with it on, plan with uncached prompt lengths"
