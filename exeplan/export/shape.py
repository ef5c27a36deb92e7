"""What the exporters of several engines ask of a plan: where its replicas are, how its layers are cut, how long its
queue may be, and what none of these engines does."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from exeplan.core.cluster import load_cluster
from exeplan.core.model import ModelSpec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Placement, ReplicaGroup, Schedule
from exeplan.errors import InputError
from exeplan.export.interface import Instance

Words = Callable[[ReplicaGroup], tuple[Sequence[str], Mapping[str, str]]]
"""The options and the environment of a group's servers."""


def instances_of(plan: Plan, engine: str, program: tuple[str, ...], words: Words) -> tuple[Instance, ...]:
    """One for each group of equal replicas. Raises InputError for a pipeline on several hosts."""
    names = [engine] if len(plan.groups) == 1 else [f"{engine}-{number}" for number in range(len(plan.groups))]
    found = []
    for group, name in zip(plan.groups, names, strict=True):
        options, environment = words(group)
        hosts, gpus = zip(*(placed_on(plan, placement) for placement in group.placements), strict=True)
        found.append(
            Instance(
                name=name, program=program, options=tuple(options), environment=environment, hosts=hosts, gpus=gpus
            )
        )
    return tuple(found)


def placed_on(plan: Plan, placement: Placement) -> tuple[int, tuple[int, ...]]:
    """The host and the GPUs of one replica; no GPUs on a CPU.

    Raises InputError for a pipeline that is on several hosts, whose parts would have to find each other.
    """
    if plan.device == "cpu":
        return 0, ()
    devices = sorted(device for stage in placement for device in stage.devices)
    each = load_cluster(plan.cluster).gpus_per_node if plan.cluster else devices[-1] + 1
    hosts = {device // each for device in devices}
    if len(hosts) > 1:
        raise InputError(
            f"the plan's pipeline is on {len(hosts)} hosts; exported are servers within one: plan with as many GPUs as "
            f"a host has ({each}), which are replicas on more hosts"
        )
    return hosts.pop(), tuple(device % each for device in devices)


def check_shape(plan: Plan, spec: ModelSpec, engine: str, policies: Sequence[str]) -> None:
    """Raises InputError for what the engine cannot run at all."""
    if spec.is_encoder_decoder:
        raise InputError(f"{engine} does not serve encoder-decoder models such as {spec.name}")
    again = f"plan again with --policy {' or '.join(policies)}"
    for group in plan.groups:
        if any(stage.phase for stage in group.placement):
            raise InputError(f"the plan has stages that only prefill, which are not exported to {engine} yet; {again}")
        if group.schedule.policy not in policies:
            raise InputError(f"{engine} cannot schedule as '{group.schedule.policy}' does; {again}")
        if len({stage.sharding for stage in group.placement}) > 1:
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

    Source: Little's law, with as many requests always in flight: each is answered after that many over the throughput.
    """
    found = plan.replay or plan.estimate
    if found is None or plan.bound is None or plan.bound.seconds == float("inf"):
        return None
    return max(int(found.throughput * plan.bound.seconds / plan.num_replicas), 1)


def most_rows(plan: Plan, group: ReplicaGroup) -> int | None:
    """Requests of one server of an `rra` plan that run after a prefill, in the mean; None where nothing says so.

    Engines that prefill as many requests as they have places then prefill as many as the plan does, in the mean. Those
    that decode, by the plan's `decode_batch` or, of equal replicas, by Little's law, are fewer by half a prefill: the
    batch shrinks by one prefill until the next.
    """
    variables, found = group.schedule.variables, plan.replay or plan.estimate
    if (decoding := variables.get("decode_batch")) is None:
        if found is None or len(plan.groups) > 1:
            return None
        decoding = math.ceil(found.token_throughput * found.tpot / plan.num_replicas)
    return decoding + math.ceil(variables["prefill_batch"] / 2)


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
    yield f"{cached} is off, as plans count every prompt token; with it on, plan with uncached prompt lengths"
