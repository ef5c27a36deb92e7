"""EngineConstants: what a serving engine adds to its kernels, as a change of a Profile's rows.

Tables time kernels alone, one after the other, on a cool device. An engine runs small kernels between them, waits for
the slowest device of a group, launches passes with prompts one kernel at a time (captured graphs hold decode passes
only), and prepares each row of a pass on the host. Of a decoder-only model's rows

    rest         decode    + layer
                 prefill   max((rest + layer) * prefill_factor, uncaptured_layer)
    attention    prefill   * prefill_factor
    all_reduce             by NCCL or the engine's own kernels, below, + all_reduce_skew * log2(tensor_parallel_size)
    all_to_all             + all_reduce_skew * log2(tensor_parallel_size)
    overhead               row * rows of the pass, instead of what there was

where `dense` and `experts` rows of one layout together are a `rest` row, whose tokens the ranks share evenly.

A datasheet's sums inside a node are NCCL's. Engines sum small tensors by kernels of their own, which are taken where
they are faster: S bytes over t devices take one launch and (t - 1) S over the link where every device reads all others
(one shot), or two and a half launches and 2 (t - 1) / t S where each sums a part and reads the others' (two shots).

Of the memory of a device `memory_share` goes to weights, keys and values, and the rest of what an engine may use
(`MEMORY_UTILIZATION`) to its passes. The shipped ones (`plans/engines/*.yaml`) come from `benchmarks/silicon/`. A file
may also state which layouts of a mixture of experts the engine runs:

    data_parallel_attention    any: ranks of any tensor-parallel degree; whole: each device a rank, or all together
    expert_parallel            whole: all devices hold whole experts, or each a part of every one
    expert_rows                all: where all tokens are on every device, small kernels of the experts pass over the
                               rows of experts elsewhere too; own: they do not

and of any model whether it has

    disaggregation             servers: some that only prefill and others that only decode, each with all layers

Where it states no such thing, experts and attention are tensor parallel, and servers prefill and decode. `policies`
are those it can schedule by, which `--policy auto` then keeps to, and `defaults` its schedules without options: the
first row that fits a device by the beginning of its name and its memory, with the variable that `gives_way` where the
KV cache holds fewer requests.
Not here: an engine's admission of requests, which is a policy's.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from exeplan.core.models.model import ModelSpec
from exeplan.core.pass_memory import MEMORY_UTILIZATION
from exeplan.core.plan import schedule_from
from exeplan.core.profile import Device, Measurement, Profile
from exeplan.core.schedule import Sharding
from exeplan.errors import InputError
from exeplan.files import read_yaml, shipped, shipped_names
from exeplan.planner.default_settings import DefaultSettings
from exeplan.policies import check_schedule
from exeplan.units import num_bytes, seconds

_MANY_ROWS = 4096
"""Where the second point of the host's straight line lies."""
_LEAST_LAYER = 0.5
"""Share of a layer's time in the tables that fused kernels cannot take away."""
_LAYOUTS = {
    "data_parallel_attention": ("any", "whole"),
    "expert_parallel": ("whole",),
    "expert_rows": ("own", "all"),
    "disaggregation": ("servers",),
}
_MOST_DEVICES = 32
"""Over which experts are spread."""
_SUM_LAUNCH, _TWO_SHOTS = 3.3e-6, 2.5
"""Of an engine's own kernels that sum over GPUs: 2.5 to 5.6 us for 4 KB over 2 to 8 GPUs, in CUDA graphs, of vLLM 0.24,
SGLang 0.5.14 and TensorRT-LLM 1.3 in AIConfigurator 0.12.0's tables; NCCL takes 6.5 to 16 us there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConstants:
    """Times in seconds."""

    name: str
    layer: float
    """Added to every layer: kernels that the tables lack; below 0 where the engine fuses those that were assumed."""
    row: float
    """The host's time for each row of a pass, not hidden behind the device."""
    all_reduce_skew: float
    """Added to every all-reduce for each doubling of the devices, which do not arrive together."""
    uncaptured_layer: float
    """The least that the products of a layer take in a pass with prompts: the host launching their kernels."""
    prefill_factor: float
    """Kernels of passes with prompts in a busy device over the same ones measured alone."""
    memory_share: float
    """Of the device's memory, for weights, keys and values."""
    data_parallel_attention: str = ""
    """`any` or `whole`; '' where it has none."""
    expert_parallel: str = ""
    """`whole`; '' where it has none."""
    expert_rows: str = "own"
    """`own` or `all`."""
    disaggregation: str = ""
    """`servers`; '' where it has none."""
    policies: tuple[str, ...] = ()
    """How it can schedule; () where that is not stated."""
    defaults: tuple[tuple[str, int, DefaultSettings], ...] = ()
    """Its settings without options: on devices whose name begins so, of at least so many bytes; the first that fits
    holds."""

    def defaults_on(self, device: Device) -> DefaultSettings | None:
        """None where they are not stated."""
        fitting = (
            s for name, least, s in self.defaults if device.name.startswith(name) and device.memory_bytes >= least
        )
        return next(fitting, None)


def load_engine(name: str) -> EngineConstants:
    """A shipped engine's constants, or those of a YAML file. Raises InputError for what is missing or no such value."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else shipped("engines", name)
    if not name.endswith((".yaml", ".yml")) and name not in shipped_names("engines"):
        raise InputError(f"no engine '{name}'; there are {', '.join(shipped_names('engines'))}, or give a YAML file")
    return engine_of(read_yaml(path), path)


def engine_of(body: Mapping[str, Any], path: Path) -> EngineConstants:
    """The constants of a file's mapping. Raises InputError as `load_engine` does."""
    optional = {*_LAYOUTS, "policies", "defaults"}
    names = [field.name for field in fields(EngineConstants) if field.name not in ("name", *optional)]
    for wrong in sorted((set(body) - optional) ^ set(names), key=str):
        what = "unknown" if wrong in body else "missing"
        raise InputError(f"{path} must give {', '.join(names)}; '{wrong}' is {what}")
    read: dict[str, Callable[[object, str], Any]]
    read = {name: _signed_seconds if name == "layer" else _seconds for name in names}
    read |= {"prefill_factor": _number, "memory_share": _number}
    for name, known in _LAYOUTS.items():
        if body.get(name, known[0]) not in known:
            raise InputError(f"{path}: {name} must be {' or '.join(known)}, found {body[name]!r}")
    found = EngineConstants(name=path.stem, **{name: read[name](body[name], f"{path}: {name}") for name in names})
    layouts: dict[str, Any] = {name: body[name] for name in _LAYOUTS if name in body}
    found = replace(found, policies=_policies(body.get("policies", []), path), **layouts)
    found = replace(found, defaults=tuple(_defaults(body.get("defaults", []), path)))
    if found.memory_share > 1:
        raise InputError(f"{path}: memory_share is at most 1, found {found.memory_share:g}")
    return found


def _policies(names: object, path: Path) -> tuple[str, ...]:
    from exeplan.policies import policy_names

    if not isinstance(names, list) or not set(map(str, names)) <= set(policy_names()):
        raise InputError(f"{path}: policies must be a list of some of {', '.join(policy_names())}, found {names!r}")
    return tuple(names)


def _defaults(rows: object, path: Path) -> Iterator[tuple[str, int, DefaultSettings]]:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{path}: defaults must be a list of schedules, found {rows!r}")
    for row in rows:
        body = dict(row)
        device, least = str(body.pop("device", "")), body.pop("memory", None)
        memory = num_bytes(str(least), f"{path}: memory") if least is not None else 0
        gives_way = str(body.pop("gives_way", "max_num_seqs"))
        try:
            schedule = schedule_from(body)
            check_schedule(schedule)
        except InputError as error:
            raise InputError(f"{path}: defaults: {error}") from None
        if gives_way not in schedule.variables:
            raise InputError(f"{path}: defaults have no '{gives_way}' that could give way")
        yield device, memory, DefaultSettings(schedule=schedule, gives_way=gives_way)


def engine_defaults(profile: Profile) -> DefaultSettings | None:
    """Settings without options of the shipped engine whose times a profile has; None of others."""
    shipped_one = profile.engine in shipped_names("engines")
    return load_engine(profile.engine).defaults_on(profile.device) if shipped_one else None


def engine_policies(profile: Profile) -> tuple[str, ...]:
    """How the shipped engine whose times a profile has can schedule; () of exeplan's own engine and of others."""
    return load_engine(profile.engine).policies if profile.engine in shipped_names("engines") else ()


def has_servers(profile: Profile) -> bool:
    """Whether the shipped engine whose times a profile has divides prefill and decode among whole servers."""
    shipped_one = profile.engine in shipped_names("engines")
    return bool(shipped_one and load_engine(profile.engine).disaggregation)


def expert_shardings(engine: EngineConstants, spec: ModelSpec, sizes: Sequence[int]) -> tuple[Sharding, ...]:
    """Layouts with whole experts on 2, 4, 8 ... devices that the engine runs, attention cut over one of these `sizes`:
    on all of these devices, or on ranks with requests of their own. None of a dense model."""
    if not spec.experts or not engine.expert_parallel:
        return ()
    numbers = [n for k in range(1, _MOST_DEVICES.bit_length()) if spec.experts.count % (n := 2**k) == 0]
    found = [Sharding(n, 1, n) for n in numbers if n in sizes]
    if engine.data_parallel_attention:
        cut = [size for size in sizes if engine.data_parallel_attention == "any" or size == 1]
        found += [Sharding(size, n // size, n) for n in numbers for size in cut if size < n and n % size == 0]
    return tuple(found)


def with_engine(profile: Profile, engine: EngineConstants) -> Profile:
    """The profile as the engine's passes take it.

    Raises InputError for an encoder-decoder model, and for a profile that has an engine's constants already.
    """
    if profile.model.is_encoder_decoder:
        raise InputError(f"constants of {engine.name} are of decoder-only models, and {profile.model.name} is none")
    if " with " in profile.source:
        raise InputError(f"the profile is '{profile.source}' already; {engine.name} needs one of kernels alone")
    dense = _dense_seconds(profile)
    byte_seconds = _seconds_per_byte(profile.measurements) if profile.source.startswith("datasheet") else None
    old = [row for row in profile.measurements if row.op != "overhead"]
    rows = [row for one in old for row in _changed(one, engine, dense, byte_seconds)]
    return replace(
        profile,
        measurements=(*rows, *_overheads(engine)),
        workspace_bytes=max(1, round((MEMORY_UTILIZATION - engine.memory_share) * profile.device.memory_bytes)),
        runtime_bytes=None,
        source=f"{profile.source} with {engine.name}",
    )


def _dense_seconds(profile: Profile) -> Callable[[Measurement], float]:
    """Of the `dense` part of a layer whose `experts` part is the row, on a rank with its share of the tokens."""
    points: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for row in profile.measurements:
        if row.op == "dense":
            points[row.tensor_parallel_size].append((row.num_tokens, row.seconds))
    curves = {size: np.array(sorted(found)).T for size, found in points.items()}

    def seconds(row: Measurement) -> float:
        return float(np.interp(row.num_tokens / row.data_parallel_size, *curves[row.tensor_parallel_size]))

    return seconds


def _seconds_per_byte(rows: Sequence[Measurement]) -> float | None:
    """Of a send inside a node, by its two largest sizes; None where there are none."""
    sends = sorted((row.bytes, row.seconds) for row in rows if (row.op, row.phase) == ("send", "intra"))[-2:]
    if len(sends) < 2:
        return None
    (few, fast), (many, slow) = sends
    return (slow - fast) / (many - few)


def _sum_seconds(row: Measurement, seconds_per_byte: float | None) -> float:
    """Of a sum inside a node by NCCL, or by the engine's kernels where they are faster."""
    if seconds_per_byte is None or row.phase != "intra":
        return row.seconds
    others, whole = row.tensor_parallel_size - 1, row.bytes * seconds_per_byte
    one_shot = _SUM_LAUNCH + others * whole
    two_shots = _TWO_SHOTS * _SUM_LAUNCH + 2 * others / row.tensor_parallel_size * whole
    return min(row.seconds, one_shot, two_shots)


def _changed(
    row: Measurement,
    engine: EngineConstants,
    dense_seconds: Callable[[Measurement], float],
    seconds_per_byte: float | None,
) -> Iterator[Measurement]:
    if row.op == "dense":
        layer = max(row.seconds + engine.layer, _LEAST_LAYER * row.seconds)
        yield replace(row, phase="decode", seconds=layer)
        yield replace(row, phase="prefill", seconds=engine.prefill_factor * layer)
    elif row.op == "experts":
        dense = dense_seconds(row)
        others = engine.prefill_factor * max(dense + engine.layer, _LEAST_LAYER * dense)
        yield replace(row, phase="decode")
        least = engine.uncaptured_layer - others
        yield replace(row, phase="prefill", seconds=max(engine.prefill_factor * row.seconds, least))
    elif row.op == "rest":
        layer = max(row.seconds + engine.layer, _LEAST_LAYER * row.seconds)
        if row.phase != "prefill":
            yield replace(row, phase="decode", seconds=layer)
        if row.phase != "decode":
            yield replace(row, phase="prefill", seconds=max(engine.prefill_factor * layer, engine.uncaptured_layer))
    elif (row.op, row.phase) == ("attention", "prefill"):
        yield replace(row, seconds=engine.prefill_factor * row.seconds)
    elif row.op in ("all_reduce", "all_to_all"):
        taken = _sum_seconds(row, seconds_per_byte) if row.op == "all_reduce" else row.seconds
        yield replace(row, seconds=taken + engine.all_reduce_skew * math.log2(row.tensor_parallel_size))
    else:
        yield row


def _overheads(engine: EngineConstants) -> Iterator[Measurement]:
    for phase in ("prefill", "decode"):
        for rows in (1, _MANY_ROWS):
            yield Measurement(op="overhead", phase=phase, num_seqs=rows, seconds=rows * engine.row, repeats=0)


def _seconds(value: object, name: str) -> float:
    return seconds(str(value), name)


def _signed_seconds(value: object, name: str) -> float:
    text = str(value).strip()
    return -seconds(text[1:], name) if text.startswith("-") else seconds(text, name)


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(f"{name} must be a number above 0, found {value!r}")
    return float(value)
