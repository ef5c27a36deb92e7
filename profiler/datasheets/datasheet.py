"""Profile of a model on a device that is known by its datasheet alone: a roofline with stated efficiencies.

`plans/devices/<name>.yaml` holds every constant with its source, and `exeplan profile MODEL --datasheet NAME --set
gemm_efficiency=0.6` overrides one; the formulas are in `roofline.py`. A layer is cut as Megatron cuts it: heads, MLP,
each expert's width and the vocabulary are shared by the tensor parallel group; key/value heads are too, and are
replicated where there are fewer of them than devices, as latent vectors are on all. A pass of T tokens reads
E (1 - (1 - k/E)^T) of E experts, k a token, all as likely unless routing is said to be uneven. With expert parallelism
experts are whole, and the busiest device's are timed (`core/sparse_layers.py`, `core/uneven_routing.py`). Latent
attention is as measured where the sheet names a table of such kernels (`latent_kernels.py`), unless a constant of
attention's roofline is overridden. No communication is in a layer's rows. Not here: whether a plan fits the memory.

`workspace_bytes` is the sheet's `runtime_memory`, the activations of a pass of 8192 tokens and float32 logits of 256
rows: of a GPU as exeplan's engine takes them (`core/pass_memory.py`; plans count them for each placement and schedule),
of a CPU residual stream, norm, and the wider of queries/keys/values and MLP.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from functools import partial
from math import inf, isclose
from pathlib import Path
from typing import Any

from exeplan.core.cluster import Cluster
from exeplan.core.models.layer_costs import embedding_parameters, layer_kv_bytes_per_token, model_parameters
from exeplan.core.models.model import DTYPE_BYTES, ModelSpec
from exeplan.core.models.sparse_layers import Experts, LatentAttention
from exeplan.core.models.uneven_routing import EVEN, busiest_part, routing_exponent
from exeplan.core.pass_memory import DEFAULT_PASSES, GRAPHS_SHARE, passes_bytes
from exeplan.core.profile import LINKS, Device, Measurement, Profile
from exeplan.core.schedule import Sharding
from exeplan.errors import InputError
from exeplan.files import read_yaml, shipped, shipped_names
from exeplan.profiler.datasheets.latent_kernels import Kernel, latent_attention_seconds, load_latent_kernels
from exeplan.profiler.datasheets.roofline import (
    POWER,
    RATE,
    SECONDS,
    SHARE,
    SIZE,
    Datasheet,
    all_reduce_seconds,
    all_to_all_seconds,
    between_layers,
    decode_attention_seconds,
    elementwise_seconds,
    gemm_seconds,
    grouped_gemm_seconds,
    prefill_attention_seconds,
)
from exeplan.units import num_bytes, seconds

TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)
MAX_CONTEXT = 131_072
"""Longest context with a row; beyond it the last slope goes on."""
MAX_TOKENS = 131_072
"""Most tokens of a pass with a row."""
_NUM_SEQS = tuple(2**i for i in range(12))
_ALIKE = 0.01
"""Links whose times differ by no more are the same."""
_LINK_BYTES = tuple(2**i for i in range(10, 31))
_SAMPLING_PASSES = 4
"""Reads and writes of the float32 logits by temperature, softmax and the draw."""
_UNITS = {f.name: f.metadata["unit"] for f in fields(Datasheet) if "unit" in f.metadata}
_OPTIONAL = {f.name for f in fields(Datasheet) if "unit" in f.metadata and f.default is not MISSING}
_KINDS = ("cpu", "cuda")


def load_datasheet(name: str, overrides: Mapping[str, str] | None = None) -> Datasheet:
    """The datasheet of a YAML file or a shipped name, with some of its constants replaced.

    Raises InputError naming the constant that is unknown, missing or out of its range.
    """
    path = Path(name).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        if name not in shipped_names("devices"):
            there = ", ".join(shipped_names("devices"))
            raise InputError(f"no datasheet file or shipped datasheet '{name}'; shipped are {there}")
        path = shipped("devices", name)
    body, changes = read_yaml(path), dict(overrides or {})
    for constant in changes:
        _check_known(constant, path.stem)
    constants = {str(key): value for key, value in body.items() if key not in ("kind", "latent_kernels")}
    for constant in constants:
        _check_known(constant, path.stem)
    if body.get("kind") not in _KINDS:
        raise InputError(f"datasheet '{path.stem}': kind must be cpu or cuda, found {body.get('kind')!r}")
    constants |= changes
    if missing := [constant for constant in _UNITS if constant not in constants and constant not in _OPTIONAL]:
        raise InputError(f"datasheet '{path.stem}' lacks {', '.join(missing)}")
    values: dict[str, Any] = {name: _value(name, constants[name], path.stem) for name in _UNITS if name in constants}
    return Datasheet(
        name=path.stem,
        kind=body["kind"],
        changes=tuple(f"{constant}={value}" for constant, value in changes.items()),
        latent_kernels="" if _changes_attention(changes) else str(body.get("latent_kernels", "")),
        **values,
    )


def _changes_attention(changes: Iterable[str]) -> bool:
    """Whether a constant of the roofline of attention is among them, which measured kernels do not follow."""
    return any(name in ("memory_bandwidth", "bfloat16_flops") or "_attention_" in name for name in changes)


def with_links(sheet: Datasheet, cluster: Cluster) -> Datasheet:
    """The datasheet with the nodes and links of a cluster of its devices. Raises InputError when they are others."""
    if cluster.device != sheet.name:
        raise InputError(
            f"cluster {cluster.name} has {cluster.device} devices, the datasheet is of {sheet.name}; "
            f"take --datasheet {cluster.device}"
        )
    return replace(
        sheet,
        intra_bandwidth=cluster.intra.bytes_per_second,
        intra_latency=cluster.intra.latency,
        inter_bandwidth=cluster.inter.bytes_per_second,
        inter_latency=cluster.inter.latency,
        gpus_per_node=cluster.gpus_per_node,
        adapters_per_node=cluster.adapters_per_node,
        changes=(*sheet.changes, f"links of cluster {cluster.name}"),
    )


def other_links(profile: Profile, cluster: Cluster) -> list[str]:
    """A sentence where a datasheet's profile has the times of other links than the cluster's: the profile's count."""
    if not profile.source.startswith("datasheet"):
        return []
    used = {"intra": cluster.gpus_per_node > 1, "inter": cluster.num_nodes > 1}
    sends = [row for row in profile.measurements if row.op == "send" and used[row.phase]]
    if all(isclose(row.seconds, getattr(cluster, row.phase).seconds(row.bytes), rel_tol=_ALIKE) for row in sends):
        return []
    return [
        f"the times of links are the profile's ({profile.source}), not those of cluster {cluster.name}; make the "
        f"profile with --cluster {cluster.reference or cluster.name} to plan by these"
    ]


def profile_from_datasheet(
    spec: ModelSpec,
    sheet: Datasheet,
    *,
    dtype: str,
    kv_dtype: str | None = None,
    tensor_parallel_sizes: Sequence[int] | None = None,
    shardings: Sequence[Sharding] = (),
    passes_over: str = "own",
    routing: str = EVEN,
) -> Profile:
    """Rows of every operation at every tensor parallel size: those given, or those of 1, 2, 4, 8 that share the heads.

    `shardings` are further ones, with expert parallelism or attention data parallelism, of a mixture of experts, whose
    tensor parallel sizes are among them. Where all tokens are on every device, small kernels of the experts pass over
    the rows of its `own` experts, or of `all`. `routing` is `even`, or how uneven a mixture's is (`uneven_routing.py`).

    `dtype` is of the layers' weights: with fp8 the rest is in bfloat16. `kv_dtype` is of keys and values, `dtype` where
    it is None. Raises InputError when a given size does not divide the heads, the device has no such dtype, or the
    weights are quantized in a way that has no roofline.
    """
    if spec.quantization and spec.quantization.planned_dtype is None:
        raise InputError(
            f"'{spec.name}' is quantized ({spec.quantization}), whose products are measured (`exeplan profile MODEL`) "
            "and neither derived from a datasheet nor imported; its unquantized checkpoint has the same sizes"
        )
    exponent = routing_exponent(routing)
    if exponent and not spec.experts:
        raise InputError(f"routing '{routing}' is of mixtures of experts, and {spec.name} is none")
    sizes = _sizes(spec, tensor_parallel_sizes)
    rows = [row for size in sizes for row in _layer_rows(spec, sheet, dtype, kv_dtype or dtype, size, exponent)]
    if spec.experts:
        all_rows = passes_over == "all"
        rows += _expert_rows(spec, spec.experts, sheet, dtype, shardings, all_rows=all_rows, exponent=exponent)
    around = embedding_parameters(spec) * (1 if spec.tied_head else 2)
    more = (*_measured(spec, sheet, dtype, kv_dtype or dtype), *([f"routing {routing}"] if exponent else []))
    return Profile(
        model=spec,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=Device(
            name=sheet.name,
            kind=sheet.kind,
            memory_bytes=int(sheet.memory),
            copy_bytes_per_second=sheet.memory_bandwidth,
            flops_per_second=sheet.flops(dtype),
        ),
        weight_bytes=(model_parameters(spec) - around) * DTYPE_BYTES[dtype]
        + around * DTYPE_BYTES[between_layers(dtype)],
        workspace_bytes=_workspace_bytes(spec, sheet, dtype, min(sizes)),
        runtime_bytes=int(sheet.runtime_memory) if sheet.kind == "cuda" else None,
        measurements=(*rows, *_overhead_rows(sheet), *_link_rows(sheet, sizes)),
        routing=routing if exponent else None,
        source=f"datasheet {', '.join((sheet.name, *sheet.changes, *more))}",
    )


def _layer_rows(
    spec: ModelSpec, sheet: Datasheet, dtype: str, kv_dtype: str, size: int, exponent: float
) -> Iterator[Measurement]:
    row, between = partial(Measurement, tensor_parallel_size=size), between_layers(dtype)
    over_layers = partial(_mean, spec.windows)
    for n in _NUM_SEQS:
        for tokens in _grid(_context(spec)):
            took = _prefill_attention(spec, sheet, between, kv_dtype, size, n, tokens, over_layers)
            yield row(op="attention", phase="prefill", num_seqs=n, num_tokens=n * tokens, seconds=took)
        for tokens in (t for t in _grid(_context(spec)) if t & (t - 1) == 0 or t == _context(spec)):
            took = _decode_attention(spec, sheet, kv_dtype, size, n, tokens, over_layers)
            yield row(op="attention", phase="decode", num_seqs=n, context_tokens=n * tokens, seconds=took)
        yield row(op="head", num_seqs=n, seconds=_head(spec, sheet, between, size, n))
    for tokens in _grid(MAX_TOKENS):
        for phase in ("prefill", "decode") if spec.is_encoder_decoder else ("",):
            took = _rest(spec, sheet, dtype, size, tokens, phase, exponent=exponent)
            yield row(op="rest", phase=phase, num_tokens=tokens, seconds=took)
        moved = 2 * tokens * spec.hidden_size * DTYPE_BYTES[between]
        yield row(op="embed", num_tokens=tokens, seconds=elementwise_seconds(sheet, moved))


def _expert_rows(
    spec: ModelSpec,
    experts: Experts,
    sheet: Datasheet,
    dtype: str,
    shardings: Sequence[Sharding],
    *,
    all_rows: bool,
    exponent: float,
) -> Iterator[Measurement]:
    """What further layouts take: a layer's products where all tokens are on every device; where ranks attend for their
    own requests, those of a rank's tokens, those of the experts, and the exchanges between them."""
    share = experts.num_layers / spec.num_layers
    for one in shardings:
        row = partial(Measurement, **one._asdict())
        for tokens in _grid(MAX_TOKENS):
            if one.data_parallel_size == 1:
                size, parts = one.tensor_parallel_size, one.expert_parallel_size
                took = _rest(spec, sheet, dtype, size, tokens, "", parts=parts, all_rows=all_rows, exponent=exponent)
                yield row(op="rest", num_tokens=tokens, seconds=took)
            else:
                took = routed_seconds(experts, spec.hidden_size, sheet, dtype, one, tokens, exponent=exponent)
                yield row(op="experts", num_tokens=tokens, seconds=share * took)
    ranks = [one for one in shardings if one.data_parallel_size > 1]
    for size in sorted({one.tensor_parallel_size for one in ranks}):
        for tokens in _grid(MAX_TOKENS):
            took = _dense(spec, sheet, dtype, size, tokens, "")
            yield Measurement(op="dense", tensor_parallel_size=size, num_tokens=tokens, seconds=took)
    for number in sorted({one.num_devices for one in ranks}):
        for where in LINKS:
            for sent in _LINK_BYTES:
                took = all_to_all_seconds(sheet, where, number, sent)
                yield Measurement(op="all_to_all", phase=where, tensor_parallel_size=number, bytes=sent, seconds=took)


def _overhead_rows(sheet: Datasheet) -> Iterator[Measurement]:
    for phase in ("prefill", "decode"):
        for n in _NUM_SEQS:
            took = sheet.host_seconds + n * sheet.host_seconds_per_sequence
            yield Measurement(op="overhead", phase=phase, num_seqs=n, seconds=took)


def _link_rows(sheet: Datasheet, sizes: Sequence[int]) -> Iterator[Measurement]:
    for where in LINKS:
        for size in _LINK_BYTES:
            yield Measurement(op="send", phase=where, bytes=size, seconds=sheet.link(where).seconds(size))
            for t in sizes:
                if t > 1:
                    took = all_reduce_seconds(sheet, where, t, size)
                    yield Measurement(op="all_reduce", phase=where, tensor_parallel_size=t, bytes=size, seconds=took)


def _prefill_attention(
    spec: ModelSpec,
    sheet: Datasheet,
    dtype: str,
    kv_dtype: str,
    size: int,
    num_seqs: int,
    tokens: int,
    over_layers: "_OverLayers",
) -> float:
    """With the store of the prompt's keys and values: an encoder layer's share of the decoder's cross cache."""
    stored = num_seqs * tokens * _kv_bytes(spec, kv_dtype, size) * _cross_share(spec)
    heads = spec.num_heads // size
    if spec.latent:
        kernel = Kernel(phase="prefill", latent=spec.latent, compute_dtype=dtype, dtype=kv_dtype)
        took = latent_attention_seconds(sheet, kernel, heads=heads, num_seqs=num_seqs, tokens=tokens)
        return elementwise_seconds(sheet, 2 * stored) + took
    attend = partial(
        prefill_attention_seconds,
        sheet,
        dtype,
        num_seqs=num_seqs,
        tokens=tokens,
        heads=heads,
        kv_heads=_kv_heads(spec, size),
        head_dim=spec.head_dim,
        causal=not spec.is_encoder_decoder,
    )
    return elementwise_seconds(sheet, 2 * stored) + over_layers(lambda window: attend(window=window))


def _decode_attention(
    spec: ModelSpec,
    sheet: Datasheet,
    dtype: str,
    size: int,
    num_seqs: int,
    context: int,
    over_layers: "_OverLayers",
) -> float:
    """Self attention, and cross attention where there is one: two kernels that share the context between them."""
    stored = elementwise_seconds(sheet, 2 * num_seqs * _kv_bytes(spec, dtype, size))
    if spec.latent:
        kernel = Kernel(phase="decode", latent=spec.latent, compute_dtype=between_layers(dtype), dtype=dtype)
        heads = spec.num_heads // size
        return stored + latent_attention_seconds(sheet, kernel, heads=heads, num_seqs=num_seqs, tokens=context)
    kernels = 2 if spec.is_encoder_decoder else 1

    def attend(window: int | None) -> float:
        return decode_attention_seconds(
            sheet,
            dtype,
            num_seqs=num_seqs,
            context_tokens=num_seqs * (context if window is None else min(context, window)) / kernels,
            kv_heads=_kv_heads(spec, size),
            head_dim=spec.head_dim,
        )

    return kernels * over_layers(attend) + stored


def _measured(spec: ModelSpec, sheet: Datasheet, dtype: str, kv_dtype: str) -> Iterator[str]:
    """What of the profile is not by the roofline, for its source."""
    if spec.latent and sheet.latent_kernels:
        kernels = load_latent_kernels(sheet.latent_kernels)
        if kernels.times(
            Kernel(phase="decode", latent=spec.latent, compute_dtype=between_layers(dtype), dtype=kv_dtype)
        ):
            yield f"latent attention as {kernels.source}"


_OverLayers = Callable[[Callable[[int | None], float]], float]
"""Of seconds by sliding window: the mean over a model's layers."""


def _mean(windows: Mapping[int | None, int], seconds: Callable[[int | None], float]) -> float:
    """Of a layer whose time depends on its sliding window: the mean over the layers, as a profile has one for all.
    `windows` is how many layers have each."""
    if len(windows) == 1:
        return seconds(*windows)
    return sum(count * seconds(window) for window, count in windows.items()) / sum(windows.values())


def _rest(
    spec: ModelSpec,
    sheet: Datasheet,
    dtype: str,
    size: int,
    tokens: int,
    phase: str,
    *,
    parts: int = 1,
    all_rows: bool = False,
    exponent: float = 0.0,
) -> float:
    """A layer but its attention: matrix products, two norms with the residual, rotation or bias, and activation.

    `prefill` is an encoder layer, `decode` a decoder layer with cross attention, "" a decoder-only model's layer.
    Experts are in `parts` of whole ones.
    """
    routed = 0.0
    if spec.experts:
        sharding = Sharding(size, expert_parallel_size=parts)
        routed = routed_seconds(
            spec.experts, spec.hidden_size, sheet, dtype, sharding, tokens, all_rows=all_rows, exponent=exponent
        )
    return _dense(spec, sheet, dtype, size, tokens, phase, routed=routed)


def _dense(
    spec: ModelSpec, sheet: Datasheet, dtype: str, size: int, tokens: int, phase: str, *, routed: float = 0.0
) -> float:
    """The same, the routed experts of a layer that has them taking so many seconds."""
    norms, element = 3 if phase == "decode" else 2, tokens * DTYPE_BYTES[between_layers(dtype)]
    took = norms * elementwise_seconds(sheet, 4 * spec.hidden_size * element)
    if spec.latent:
        took += latent_projection_seconds(spec, spec.latent, sheet, dtype, size, tokens)
    else:
        took += _projections(spec, sheet, dtype, size, tokens, phase)
    mlp = partial(_mlp, spec, sheet, dtype, tokens)
    dense = mlp(-(-spec.intermediate_size // size))
    if not (experts := spec.experts):
        return took + dense
    sparse = routed
    if experts.shared_width:
        sparse += mlp(-(-experts.shared_width // size))
    return took + (experts.num_layers * sparse + (spec.num_layers - experts.num_layers) * dense) / spec.num_layers


def _projections(spec: ModelSpec, sheet: Datasheet, dtype: str, size: int, tokens: int, phase: str) -> float:
    """Of queries, keys, values and the output, with their rotation or bias."""
    gemm, hidden = partial(gemm_seconds, sheet, dtype, tokens), spec.hidden_size
    queries, keys = spec.num_heads // size * spec.head_dim, 2 * _kv_heads(spec, size) * spec.head_dim
    took = gemm(queries + keys, hidden) + gemm(hidden, queries)
    if phase == "decode":
        took += gemm(queries, hidden) + gemm(hidden, queries)
    if phase == "prefill":
        took += gemm(keys, hidden) * _cross_share(spec)
    return took + elementwise_seconds(sheet, 2 * (queries + keys / 2) * tokens * DTYPE_BYTES[between_layers(dtype)])


def latent_projection_seconds(
    spec: ModelSpec, latent: LatentAttention, sheet: Datasheet, dtype: str, size: int, tokens: int
) -> float:
    """Down to the latent vectors on every device, up to its own heads; absorbed, keys and values take as many
    operations of a token that decodes."""
    gemm, hidden, heads = partial(gemm_seconds, sheet, dtype, tokens), spec.hidden_size, spec.num_heads // size
    queries = heads * spec.head_dim
    took = gemm(queries, latent.query_rank or hidden) + gemm(hidden, heads * latent.value_dim)
    took += gemm((latent.query_rank or 0) + latent.kept, hidden)
    took += gemm(heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)
    moved = 2 * (queries + latent.kept) * tokens * DTYPE_BYTES[between_layers(dtype)]
    return took + 2 * elementwise_seconds(sheet, moved)


def _mlp(spec: ModelSpec, sheet: Datasheet, dtype: str, tokens: int, inner: int) -> float:
    """Of the intermediate size `inner`, with its activation."""
    gemm, ups = partial(gemm_seconds, sheet, dtype, tokens), 2 if spec.gated_mlp else 1
    took = gemm(ups * inner, spec.hidden_size) + gemm(spec.hidden_size, inner)
    return took + elementwise_seconds(sheet, (ups + 1) * inner * tokens * DTYPE_BYTES[between_layers(dtype)])


def routed_seconds(
    experts: Experts,
    hidden: int,
    sheet: Datasheet,
    dtype: str,
    sharding: Sharding,
    tokens: int,
    *,
    all_rows: bool = False,
    exponent: float = 0.0,
) -> float:
    """Router and experts on the device with the most rows, of the tokens of all ranks; a kernel gathers the rows by
    expert, and one sums them: its own, or those of experts elsewhere too. `exponent` is that of uneven routing."""
    parts = sharding.expert_parallel_size
    inner = -(-experts.width * parts // sharding.num_devices)
    rows, touched = busiest_part(experts, tokens, parts, exponent)
    product = partial(grouped_gemm_seconds, sheet, dtype, rows, num_groups=touched)
    own = tokens / sharding.data_parallel_size
    took = gemm_seconds(sheet, between_layers(dtype), own, experts.count, hidden)
    took += product(2 * inner, hidden) + product(hidden, inner)
    moved = (tokens * experts.per_token if all_rows else rows) * DTYPE_BYTES[between_layers(dtype)]
    return took + 2 * elementwise_seconds(sheet, 2 * hidden * moved) + elementwise_seconds(sheet, 3 * inner * moved)


def _head(spec: ModelSpec, sheet: Datasheet, dtype: str, size: int, num_seqs: int) -> float:
    """Final norm, this device's part of the vocabulary, and sampling over all of it."""
    norm = elementwise_seconds(sheet, 2 * num_seqs * spec.hidden_size * DTYPE_BYTES[dtype])
    logits = gemm_seconds(sheet, dtype, num_seqs, -(-spec.vocab_size // size), spec.hidden_size)
    return norm + logits + _SAMPLING_PASSES * elementwise_seconds(sheet, 4 * num_seqs * spec.vocab_size)


def _cross_share(spec: ModelSpec) -> float:
    """Decoder layers whose cross keys and values one encoder layer accounts for; 1 for a decoder-only layer's own."""
    return spec.num_layers / spec.num_encoder_layers if spec.is_encoder_decoder else 1.0


def _kv_heads(spec: ModelSpec, size: int) -> int:
    """Key/value heads on one device: replicated where the group is larger than their number."""
    return -(-spec.num_kv_heads // size)


def _kv_bytes(spec: ModelSpec, dtype: str, size: int) -> float:
    whole = layer_kv_bytes_per_token(spec, dtype)
    return float(whole) if spec.latent else whole * _kv_heads(spec, size) / spec.num_kv_heads


def _workspace_bytes(spec: ModelSpec, sheet: Datasheet, dtype: str, size: int) -> int:
    if sheet.kind == "cuda":
        passes = passes_bytes(spec, dtype, DEFAULT_PASSES, Sharding(size))
        return int(sheet.runtime_memory + GRAPHS_SHARE * sheet.memory + passes)
    queries = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    inner = spec.intermediate_size
    if experts := spec.experts:
        inner = max(inner, experts.per_token * experts.width + experts.shared_width)
    widest = max(queries, (2 if spec.gated_mlp else 1) * inner)
    activations = DEFAULT_PASSES.tokens * (2 * spec.hidden_size + widest) * DTYPE_BYTES[between_layers(dtype)]
    return int(sheet.runtime_memory + activations + 4 * DEFAULT_PASSES.rows * spec.vocab_size)


def _context(spec: ModelSpec) -> int:
    return min(spec.max_context, MAX_CONTEXT)


def _grid(limit: int) -> list[int]:
    """1 to `limit`, four points to a doubling: between them a quadratic is interpolated to 1.3 %."""
    points = {quarter * 2**i // 4 for i in range(2, limit.bit_length() + 1) for quarter in (4, 5, 6, 7)}
    return sorted({1, 2, 3, limit} | {point for point in points if point <= limit})


def tensor_parallel_sizes_of(spec: ModelSpec) -> tuple[int, ...]:
    """Those of 1, 2, 4, 8 that share the heads."""
    return tuple(size for size in TENSOR_PARALLEL_SIZES if spec.num_heads % size == 0)


def _sizes(spec: ModelSpec, asked: Sequence[int] | None) -> tuple[int, ...]:
    if asked is None:
        return tensor_parallel_sizes_of(spec)
    for size in asked:
        if size < 1 or spec.num_heads % size:
            fitting = [n for n in range(1, spec.num_heads + 1) if spec.num_heads % n == 0 and n <= 16]
            raise InputError(
                f"tensor parallel size {size} does not divide the {spec.num_heads} heads of {spec.name}; "
                f"{', '.join(map(str, fitting))} do"
            )
    return tuple(sorted(set(asked)))


def _check_known(constant: str, sheet: str) -> None:
    if constant not in _UNITS:
        near = difflib.get_close_matches(constant, _UNITS, n=1, cutoff=0.0)[0]
        raise InputError(f"datasheet '{sheet}': no constant '{constant}'; the nearest is {near}")


def _value(constant: str, text: Any, sheet: str) -> float:
    """The constant in seconds, bytes, operations a second, or as a plain number, checked against its range."""
    unit, where = _UNITS[constant], f"datasheet '{sheet}': {constant}"
    if unit == SECONDS:
        value = seconds(str(text), where)
        if value == inf:
            raise InputError(f"{where} must be finite, found '{text}'")
        return value
    if unit == SIZE:
        return float(num_bytes(str(text), where))
    low, high = {SHARE: (0.0, 1.0), RATE: (0.0, 1e20), POWER: (1.0, 100.0)}[unit]
    try:
        value = float(str(text))
    except ValueError:
        value = -1.0
    if not low <= value <= high or value == 0:
        raise InputError(f"{where} must be a number from {low:g} to {high:g}, above zero, found '{text}'")
    return value
