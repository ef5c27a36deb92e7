"""Memory that passes of exeplan's engine take on a GPU, without weights, keys and values: counting, from sizes alone.

A pass of T tokens holds, on each of n GPUs, hidden states (E values a token) and what one block adds to them:

    feed-forward   4 E + 2 I / n, gated 4 E + 3 I / n; gated on one GPU 3 E + 3 I: the last product adds to the residual
    its sum        5 E + I / n, where it is summed over GPUs
    attention      4 E + (2 Q + K) / n, of Q values of queries and K of keys and values
    experts        6 E, and of some tokens at a time what their k experts add (`kernels/products/expert_products.py`)

and angles and indices. R rows have logits in float32 twice, with their log-probabilities; captured decode iterations
keep theirs. Graphs themselves are given a share of the GPU. `tests/standins` holds all of it against the engine's own
measurement (`runner/compute/gpu_memory.py`).

Not here: quantized products, whose rows in 8 bits come and go; other engines, which say a share of the GPU.
"""

from dataclasses import dataclass

from exeplan.core.models.model import DTYPE_BYTES, ModelSpec
from exeplan.core.schedule import Sharding

MEMORY_UTILIZATION = 0.9
"""Share of a GPU's memory that weights, KV cache and workspace may take where none is asked for."""
GRAPHS_SHARE = 0.01
"""Of a GPU's memory, for the CUDA graphs of decode iterations without their logits, which are captured after the cache
is allocated."""
_TOKEN_BYTES, _ANGLE_BYTES = 40, 4
"""Of a token's indices, and of its angles for each value of a head."""
_FLOAT32 = 4
_EXPERT_TOKENS, _FEW_ROWS, _MANY_ROWS = 2048, 16, 64
"""Tokens that go to their experts at a time, and rows of a block for few and for many tokens an expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestPasses:
    """The largest passes that a GPU must have memory for."""

    tokens: int
    """Of a prefill."""
    rows: int
    """Of a decode pass, over all micro-batches."""
    captured_rows: int
    """Of a captured decode iteration."""


DEFAULT_PASSES = LargestPasses(tokens=8192, rows=256, captured_rows=256)
"""Where no schedule says: of a profile's `workspace_bytes`."""
LEAST_PASSES = LargestPasses(tokens=512, rows=1, captured_rows=1)
"""What a GPU must have memory for whatever the schedule."""


def passes_bytes(spec: ModelSpec, dtype: str, passes: LargestPasses, sharding: Sharding, *, last: bool = True) -> int:
    """On one GPU, for the larger of both passes; `last` is a stage with the output head."""
    largest = max(_pass_bytes(spec, dtype, n, sharding) for n in (passes.tokens, passes.rows))
    if not last:
        return largest
    logits = 2 * _FLOAT32 * passes.rows * spec.vocab_size
    return max(largest, logits) + captured_logits_bytes(spec, passes.captured_rows)


def captured_logits_bytes(spec: ModelSpec, rows: int) -> int:
    """Of the logits `[B, V]`, float32, which all captured decode iterations of the last stage share."""
    return _FLOAT32 * rows * spec.vocab_size


def _pass_bytes(spec: ModelSpec, dtype: str, tokens: int, sharding: Sharding) -> int:
    """Without logits."""
    element, size = max(DTYPE_BYTES[dtype], DTYPE_BYTES["bfloat16"]), sharding.tensor_parallel_size
    hidden = element * spec.hidden_size
    keys = spec.kv_width / min(size, spec.num_kv_shares)
    parts = [4 * hidden + element * (2 * spec.num_heads * spec.head_dim / size + keys)]
    if not spec.experts or spec.experts.num_layers < spec.num_layers:
        inner = element * -(-spec.intermediate_size // size)
        fused = spec.gated_mlp and size == 1
        parts.append((3 if fused else 4) * hidden + (3 if spec.gated_mlp else 2) * inner)
        parts.append((5 * hidden + inner) * (size > 1))
    together = 0
    if experts := spec.experts:
        parts.append(5 * hidden + 3 * element * experts.shared_width / size)
        parts.append(6 * hidden * (tokens > _EXPERT_TOKENS))
        together = 5 * hidden * tokens + _experts_bytes(spec, element, min(tokens, _EXPERT_TOKENS), sharding)
    around = _TOKEN_BYTES + _ANGLE_BYTES * spec.head_dim
    return round(max(max(parts) * tokens, together) + around * tokens)


def _experts_bytes(spec: ModelSpec, element: int, tokens: int, sharding: Sharding) -> int:
    """Of tokens that go to their experts together: rows of both products, and the outputs in float32."""
    assert spec.experts is not None
    experts, parts = spec.experts, sharding.expert_parallel_size
    held, width = -(-experts.count // parts), -(-experts.width * parts // sharding.num_devices)
    pairs = tokens * experts.per_token
    block = _FEW_ROWS if pairs <= _FEW_ROWS * held else _MANY_ROWS
    rows = pairs + min(pairs, held) * (block - 1)
    outputs = _FLOAT32 * (pairs + tokens) * spec.hidden_size
    return 3 * element * width * rows + outputs
