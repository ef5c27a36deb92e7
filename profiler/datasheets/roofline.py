"""Roofline: seconds of one kernel from what it computes and moves, with a datasheet's efficiencies.

    gemm               latency + (operations^p + bytes^p)^(1/p)            p = gemm_sharpness
    experts' product   as a gemm of all rows; the bytes are those of the experts that some row goes to
    prefill attention  latency + operations + bytes                        a causal prompt: half of the square
    decode attention   latency + sequences * kv heads * a constant + bytes of keys and values
    latent decode      latency + sequences * a constant + operations joined with bytes of the latent vectors
    element-wise       latency + bytes
    all-to-all         latency + bytes that a device sends / (efficiency * link)
    all-reduce         latency + (t - 1) * step + wire + sqrt(ramp * wire)  wire: 2 (t - 1) / t of the bytes
                       over m nodes of n devices by parts, where nodes have several adapters: both wires, of n devices
                       within and of m devices across with the bytes divided by the adapters

where `operations` stands for operations / (efficiency * peak) and `bytes` for bytes / (efficiency * bandwidth). The
norm joins the limits of a matrix product smoothly: they overlap, and near the ridge neither is reached. The square root
is what a pipelined transfer loses to filling its pipeline with the best number of chunks. Left out: whole tiles and
waves of them, which cost a product of a few hundred rows up to a quarter more or less.

In fp8 products read 8-bit rows and weights and write 16 bits, at the device's fp8 peak; attention computes in bfloat16,
and reads keys and values of their own dtype. A layer's fp8 products reach less of their peak than those in bfloat16,
and begin later, as their rows are quantized first: a sheet may give them constants of their own. Experts' products take
those of bfloat16 in both, above and below which the measured ones lie.

All shapes are those of one device's shard. Not here: which kernels a layer runs (`datasheet.py`).
"""

from dataclasses import dataclass, field, replace
from math import ceil, log2, sqrt
from typing import Any

from exeplan.core.cluster import Link
from exeplan.core.models.model import DTYPE_BYTES, FP8
from exeplan.errors import InputError

SHARE, RATE, SECONDS, SIZE, POWER = "share", "rate", "seconds", "size", "power"


def _constant(unit: str) -> Any:
    return field(metadata={"unit": unit})


def _optional(unit: str) -> Any:
    return field(default=None, metadata={"unit": unit})


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasheet:
    """A device's constants. Rates are per second and device, links one direction between two devices."""

    name: str
    kind: str
    """`cpu` or `cuda`."""
    changes: tuple[str, ...] = ()
    """What was overridden, as `gemm_efficiency=0.6`."""
    gpus_per_node: int = 1
    """This and the next: of a cluster's nodes, once it is known (`with_links`)."""
    adapters_per_node: int = 1
    latent_kernels: str = ""
    """Of `plans/kernels`: measured latent attention (`latent_kernels.py`), '' where the roofline says it."""
    memory: float = _constant(SIZE)
    memory_bandwidth: float = _constant(SIZE)
    float32_flops: float = _constant(RATE)
    bfloat16_flops: float = _constant(RATE)
    float16_flops: float = _constant(RATE)
    fp8_flops: float = field(default=0.0, metadata={"unit": RATE})
    """0 where the device has no fp8."""
    gemm_latency: float = _constant(SECONDS)
    gemm_efficiency: float = _constant(SHARE)
    gemm_bandwidth_efficiency: float = _constant(SHARE)
    gemm_sharpness: float = _constant(POWER)
    fp8_gemm_latency: float | None = _optional(SECONDS)
    """This and the next three: of a layer's products in fp8, where they differ; the quantization of rows included."""
    fp8_gemm_efficiency: float | None = _optional(SHARE)
    fp8_gemm_bandwidth_efficiency: float | None = _optional(SHARE)
    fp8_gemm_sharpness: float | None = _optional(POWER)
    prefill_attention_latency: float = _constant(SECONDS)
    prefill_attention_efficiency: float = _constant(SHARE)
    prefill_attention_bandwidth_efficiency: float = _constant(SHARE)
    decode_attention_latency: float = _constant(SECONDS)
    decode_attention_efficiency: float = _constant(SHARE)
    """Of the memory bandwidth."""
    decode_attention_seconds_per_head: float = _constant(SECONDS)
    """For one sequence and key/value head, whatever its context."""
    elementwise_latency: float = _constant(SECONDS)
    elementwise_efficiency: float = _constant(SHARE)
    host_seconds: float = _constant(SECONDS)
    """Of the CPU in one iteration, not overlapped with the device."""
    host_seconds_per_sequence: float = _constant(SECONDS)
    all_reduce_latency: float = _constant(SECONDS)
    all_reduce_step_latency: float = _constant(SECONDS)
    """For each device beyond the first."""
    all_reduce_efficiency: float = _constant(SHARE)
    """Of the link's bandwidth, by large tensors inside a node."""
    all_reduce_inter_efficiency: float = _constant(SHARE)
    all_reduce_ramp: float = _constant(SECONDS)
    all_to_all_latency: float = field(default=0.0, metadata={"unit": SECONDS})
    """Of tokens that go to their experts, or back; 0 where it is taken to be an all-reduce's."""
    all_to_all_efficiency: float = field(default=0.0, metadata={"unit": SHARE})
    """Of the link's bandwidth; 0 for an all-reduce's inside a node."""
    intra_bandwidth: float = _constant(SIZE)
    intra_latency: float = _constant(SECONDS)
    inter_bandwidth: float = _constant(SIZE)
    inter_latency: float = _constant(SECONDS)
    runtime_memory: float = _constant(SIZE)
    """Bytes held besides weights, activations and KV cache: driver context, libraries, communication buffers."""

    def flops(self, dtype: str) -> float:
        """Peak operations a second, dense. Raises InputError where the device has none of this dtype."""
        found: float = getattr(self, f"{dtype}_flops")
        if not found:
            raise InputError(
                f"datasheet '{self.name}' has no {dtype}_flops: take another dtype, or --set {dtype}_flops=NUMBER"
            )
        return found

    def link(self, where: str) -> Link:
        """`intra` or `inter` node."""
        if where == "intra":
            return Link(bytes_per_second=self.intra_bandwidth, latency=self.intra_latency)
        return Link(bytes_per_second=self.inter_bandwidth, latency=self.inter_latency)


def between_layers(dtype: str) -> str:
    """The dtype of hidden states, embedding, head and attention of a model with weights of this dtype."""
    return "bfloat16" if dtype == FP8 else dtype


def gemm_seconds(sheet: Datasheet, dtype: str, m: float, n: float, k: float) -> float:
    """[m, k] times [k, n]."""
    return _product(_of_dtype(sheet, dtype), dtype, m, n, k, num_groups=1.0)


def _of_dtype(sheet: Datasheet, dtype: str) -> Datasheet:
    """With the constants of products in fp8, as far as the sheet has some, in place of the others."""
    names = ("gemm_latency", "gemm_efficiency", "gemm_bandwidth_efficiency", "gemm_sharpness") if dtype == FP8 else ()
    own = {name: value for name in names if (value := getattr(sheet, f"fp8_{name}")) is not None}
    return replace(sheet, **own) if own else sheet


def grouped_gemm_seconds(sheet: Datasheet, dtype: str, m: float, n: float, k: float, *, num_groups: float) -> float:
    """[m, k] times one of `num_groups` matrices [k, n] for each row, all in one kernel."""
    return _product(sheet, dtype, m, n, k, num_groups=num_groups)


def _product(sheet: Datasheet, dtype: str, m: float, n: float, k: float, *, num_groups: float) -> float:
    compute = 2 * m * n * k / (sheet.gemm_efficiency * sheet.flops(dtype))
    moved = DTYPE_BYTES[dtype] * (m * k + num_groups * k * n) + DTYPE_BYTES[between_layers(dtype)] * m * n
    memory = moved / (sheet.gemm_bandwidth_efficiency * sheet.memory_bandwidth)
    return sheet.gemm_latency + _joined(sheet, compute, memory)


def _joined(sheet: Datasheet, compute: float, memory: float) -> float:
    """Seconds of two that overlap, neither of which reaches its limit near the ridge."""
    low, high = sorted((compute, memory))
    p = sheet.gemm_sharpness
    return high * (1 + (low / high) ** p) ** (1 / p)


def elementwise_seconds(sheet: Datasheet, moved: float) -> float:
    """Seconds of one kernel that reads and writes `size` bytes in all."""
    return sheet.elementwise_latency + moved / (sheet.elementwise_efficiency * sheet.memory_bandwidth)


def prefill_attention_seconds(
    sheet: Datasheet,
    dtype: str,
    *,
    num_seqs: float,
    tokens: float,
    heads: int,
    kv_heads: int,
    head_dim: float,
    causal: bool,
    window: int | None = None,
) -> float:
    """Attention of `num_seqs` whole prompts of `tokens` each, of each token to the last `window` where there is one."""
    reach = tokens if window is None else min(tokens, window)
    pairs = num_seqs * (reach * (tokens - reach / 2) if causal else tokens * tokens)
    moved = DTYPE_BYTES[dtype] * num_seqs * tokens * 2 * (heads + kv_heads) * head_dim
    return (
        sheet.prefill_attention_latency
        + 4 * pairs * heads * head_dim / (sheet.prefill_attention_efficiency * sheet.flops(dtype))
        + moved / (sheet.prefill_attention_bandwidth_efficiency * sheet.memory_bandwidth)
    )


def decode_attention_seconds(
    sheet: Datasheet, dtype: str, *, num_seqs: int, context_tokens: float, kv_heads: int, head_dim: int
) -> float:
    """One query token a sequence over `context_tokens` keys and values of all sequences together."""
    moved = DTYPE_BYTES[dtype] * 2 * context_tokens * kv_heads * head_dim
    return (
        sheet.decode_attention_latency
        + num_seqs * kv_heads * sheet.decode_attention_seconds_per_head
        + moved / (sheet.decode_attention_efficiency * sheet.memory_bandwidth)
    )


def latent_decode_seconds(
    sheet: Datasheet, dtype: str, *, num_seqs: float, context_tokens: float, heads: int, rank: int, rope_dim: int
) -> float:
    """One query token a sequence over the latent vectors of all sequences, the projections of keys and values absorbed:
    each head multiplies with `rank + rope_dim` values of a token for its score, and with `rank` for its output. `dtype`
    is that of the vectors."""
    moved = DTYPE_BYTES[dtype] * context_tokens * (rank + rope_dim)
    operations = 2 * context_tokens * heads * (2 * rank + rope_dim)
    return (
        sheet.decode_attention_latency
        + num_seqs * sheet.decode_attention_seconds_per_head
        + _joined(
            sheet,
            operations / (sheet.prefill_attention_efficiency * sheet.flops(between_layers(dtype))),
            moved / (sheet.decode_attention_efficiency * sheet.memory_bandwidth),
        )
    )


def all_reduce_seconds(sheet: Datasheet, where: str, devices: int, size: float) -> float:
    """Seconds of an all-reduce over `devices` devices, `intra` node or `inter` nodes, of `size` bytes on each; over
    whole nodes by parts where that is faster."""
    crossings = 0.0 if where == "intra" else 2 * sheet.inter_latency
    latency = sheet.all_reduce_latency + (devices - 1) * sheet.all_reduce_step_latency + crossings
    wire = _wire_seconds(sheet, where, devices, size)
    ring = latency + wire + sqrt(sheet.all_reduce_ramp * wire)
    nodes, left = divmod(devices, sheet.gpus_per_node)
    if where == "intra" or nodes < 2 or left or sheet.adapters_per_node == 1:
        return ring
    return min(ring, _by_parts_seconds(sheet, nodes, size))


def _by_parts_seconds(sheet: Datasheet, nodes: int, size: float) -> float:
    """Summed and scattered within each node, each part summed across nodes, through all adapters at once, and gathered
    within. Steps within a node are those of its ring, steps across those of a tree and back."""
    each, hops = sheet.gpus_per_node, ceil(log2(nodes))
    steps = (each - 1 + hops) * sheet.all_reduce_step_latency + 2 * hops * sheet.inter_latency
    within = _wire_seconds(sheet, "intra", each, size)
    across = _wire_seconds(sheet, "inter", nodes, size / sheet.adapters_per_node)
    ramps = sqrt(sheet.all_reduce_ramp * within) + sqrt(sheet.all_reduce_ramp * across)
    return sheet.all_reduce_latency + steps + within + across + ramps


def _wire_seconds(sheet: Datasheet, where: str, devices: int, size: float) -> float:
    """What a ring's bytes take on a link."""
    share = sheet.all_reduce_efficiency if where == "intra" else sheet.all_reduce_inter_efficiency
    return 2 * (devices - 1) / devices * size / (share * sheet.link(where).bytes_per_second)


def all_to_all_seconds(sheet: Datasheet, where: str, devices: int, size: float) -> float:
    """Seconds in which each of `devices` devices sends `size` bytes to the others over these links."""
    link = sheet.link(where)
    latency = sheet.all_to_all_latency or sheet.all_reduce_latency + (devices - 1) * sheet.all_reduce_step_latency
    share = sheet.all_to_all_efficiency or sheet.all_reduce_efficiency
    share = share if where == "intra" else sheet.all_reduce_inter_efficiency
    return latency + (0.0 if where == "intra" else link.latency) + size / (share * link.bytes_per_second)
