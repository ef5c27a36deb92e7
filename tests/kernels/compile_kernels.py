"""Compiles kernels for sm_90 on a machine without a GPU, and prints a line for each launch: name, stack bytes, shared
memory bytes. With the argument `sizes` batches of many sizes: name, and what was compiled, the same where nothing was.

Run by test_compiled.py in its own process, because the other tests run the same kernels interpreted. A driver
that only names the GPU stands in for the real one, launches stop behind the compiler.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

torch.backends.cuda.is_built = lambda: True
from exeplan.kernels.activation import KINDS  # noqa: E402
from exeplan.kernels.attention.online_softmax import DistanceBias, PagedKV  # noqa: E402
from exeplan.kernels.attention.slot_attention import Slots  # noqa: E402
from exeplan.kernels.attention.spans import Span, Spans  # noqa: E402
from exeplan.kernels.select import TRITON as KERNELS  # noqa: E402
from exeplan.kernels.tuning import Config  # noqa: E402

HEADS, KV_HEADS, TOKENS, BATCH = 32, 8, 64, 3
CPU = torch.device("cpu")


class NamedGpu:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compile_only(function, *args, warmup=False, **options):
    compiled = run(function, *args, warmup=True, **options)
    if sys.argv[1:] == ["sizes"]:
        print(compiled.metadata.name, compiled.hash, flush=True)
        return compiled
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    stack = re.search(r"STACK:(\d+)", usage.stdout)[1]
    print(compiled.metadata.name, stack, compiled.metadata.shared, flush=True)
    return compiled


def launch_attention(dtype: torch.dtype, head_dim: int, cache_dtype: torch.dtype) -> None:
    tables = torch.empty(2, KV_HEADS * 1024, head_dim, dtype=cache_dtype)
    cache = PagedKV(*tables, torch.zeros(BATCH, 64, dtype=torch.int32), KV_HEADS)
    end_B = torch.ones(BATCH, dtype=torch.int32)
    q, k, v = torch.empty(TOKENS + BATCH, HEADS + 2 * KV_HEADS, head_dim, dtype=dtype).split(
        (HEADS, KV_HEADS, KV_HEADS), 1
    )
    spans = Spans([Span(TOKENS, cached=(0, 20))], CPU)
    KERNELS.paged_attention(q[:BATCH], cache, end_B, scale=1.0, num_parts=4)
    KERNELS.ragged_attention(q, k, v, spans, scale=1.0, cache=cache, bias=DistanceBias(torch.zeros(HEADS, 257), 128))
    KERNELS.mixed_attention(q, k, v, spans, cache, cache, end_B, scale=1.0)
    slots, bias = Slots(TOKENS, 32, [(0, 20)], CPU), DistanceBias(torch.zeros(HEADS, 63), 31)
    KERNELS.slot_attention(q[:TOKENS], k[:TOKENS], v[:TOKENS], slots, scale=1.0, bias=bias)
    KERNELS.slot_attention(q[:TOKENS], k[:TOKENS], v[:TOKENS], slots, scale=1.0, causal=True)


def launch_in_8_bits(dtype: torch.dtype, head_dim: int) -> None:
    """Besides attention what a GPU with fp8 runs."""
    heads, four = torch.empty(4, 2 * KV_HEADS, head_dim, dtype=dtype), torch.arange(4)
    tables = torch.empty(2, 2, KV_HEADS * 1024, head_dim, dtype=torch.float8_e4m3fn)
    KERNELS.store_slots(heads, four, tables[0])
    KERNELS.scatter_slots(heads[None], four, tables[:1])
    KERNELS.quantize_rows(torch.empty(4, 4096, dtype=dtype))


def launch_the_rest(dtype: torch.dtype) -> None:
    hidden, heads = torch.empty(4, 4096, dtype=dtype), torch.empty(4, HEADS + 2 * KV_HEADS, 128, dtype=dtype)
    KERNELS.add_rms_norm(hidden, hidden, hidden[0], 1e-5)
    KERNELS.add_layer_norm(hidden, hidden, hidden[0], hidden[0], 1e-5)
    KERNELS.rms_norm(heads[:, :HEADS], heads[0, 0], 1e-5, out=heads[:, :HEADS])
    KERNELS.rotate(heads, *torch.empty(2, 4, 1, 128, dtype=dtype))
    for kind in KINDS:
        KERNELS.gated_activation(hidden, kind)
    tables, four = torch.empty(2, 2, KV_HEADS * 1024, 128, dtype=dtype), torch.arange(4)
    KERNELS.store_slots(heads[:, HEADS:], four, tables[0])
    KERNELS.scatter_slots(heads[None, :, HEADS:], four, tables[:1])
    for tokens in (4, 512):  # A block of few rows, and one of many.
        experts = torch.zeros(tokens, 2, dtype=torch.int64)
        KERNELS.expert_mlp(
            torch.empty(tokens, 1024, dtype=dtype),
            torch.empty(tokens, 2),
            experts,
            torch.empty(8, 256, 1024, dtype=dtype),
            torch.empty(8, 1024, 128, dtype=dtype),
            "silu",
        )
    logits = torch.empty(4, 32000)
    KERNELS.most_likely(logits)
    KERNELS.draw(logits, *torch.empty(1, 4), four.int(), *torch.empty(2, 4), four)


def launch_in_many_sizes(dtype: torch.dtype) -> None:
    """Of one head, so that numbers are 1, a multiple of 16, and others."""
    config, tables = Config(rows=16, columns=16), torch.empty(2, 1024, 16, dtype=dtype)
    cache = PagedKV(*tables, torch.zeros(BATCH, 64, dtype=torch.int32), 1)
    q, k, v = torch.empty(256 + BATCH, 3, 16, dtype=dtype).split(1, 1)
    for tokens, parts in ((16, 2), (32, 3), (256, 16)):
        spans, rows = Spans([Span(tokens)], CPU), slice(tokens + BATCH)
        end_B = torch.ones(BATCH, dtype=torch.int32)
        KERNELS.mixed_attention(
            q[rows], k[rows], v[rows], spans, None, cache, end_B, scale=1.0, num_parts=parts, config=config
        )
        slots = Slots(tokens, tokens, [(0, 1)], CPU)
        KERNELS.slot_attention(q[:tokens], k[:tokens], v[:tokens], slots, scale=1.0, config=config)
    slots = Slots(20, 10, [(0, 1)], CPU)
    KERNELS.slot_attention(q[:20], k[:20], v[:20], slots, scale=1.0, config=config)
    weights = torch.empty(4, 64, 32, dtype=dtype), torch.empty(4, 32, 32, dtype=dtype)
    for tokens in (1, 3, 16):
        experts = torch.zeros(tokens, 1, dtype=torch.int64)
        KERNELS.expert_mlp(torch.empty(tokens, 32, dtype=dtype), torch.empty(tokens, 1), experts, *weights, "silu")


driver.set_active(NamedGpu())
run, JITFunction.run = JITFunction.run, compile_only
if sys.argv[1:] == ["sizes"]:
    launch_in_many_sizes(torch.bfloat16)
    sys.exit()
launch_attention(torch.bfloat16, 128, torch.bfloat16)
launch_attention(torch.float32, 64, torch.float32)
launch_attention(torch.bfloat16, 128, torch.float8_e4m3fn)
launch_in_8_bits(torch.bfloat16, 128)
launch_the_rest(torch.bfloat16)
