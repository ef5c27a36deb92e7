"""The CPU's kernels on one core: GFLOP/s of products by shape and rows, GB/s of decode attention against plain reads.

    python -m benchmarks.engine.kernels [--rows 1 4 16 32 512] [--tokens 64 192 512] [--repeats 5]

Products are of the engine's layers and of torch for the same weight: float32, bfloat16, 8 bits with a scale an output
(rows of one digit, and of as many as bfloat16 needs) and 4 bits in groups of 128; FLOP are 2 N I O whatever the digits.
Decode attention is of 32 sequences of equal length, by the compiled kernel and by torch's operations, with all heads
and with a quarter of them for keys and values, and blocks in order or anywhere. Weights and caches come from memory: as
many in turn as take `--megabytes`. Bytes of attention are keys and values, once. A read of memory is a sum of an array
of that size. All take turns in a process pinned to a core, on its CPU time; medians of the repeats. Writes
records/engine-kernels.json.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole field uses
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.lib.record import write_record
from exeplan.kernels import native
from exeplan.kernels.attention.plain import CachedRows, decode_attention
from exeplan.kernels.products.int_linear import IntLinear
from exeplan.kernels.products.linear import Linear
from exeplan.planner.reports.tables import table
from exeplan.runner.compute.passes.host_allocator import in_huge_pages

SHAPES = {"qkv": (1536, 1024), "up and gate": (5632, 1024), "down": (1024, 2816)}
"""Outputs and inputs of a Llama's layer with 16 and 4 heads."""
HEADS = {"8 and 8 heads": (8, 8), "16 and 4 heads": (16, 4)}
SEQUENCES, HEAD_DIM, BLOCK, GROUP = 32, 64, 16, 128

Call = Callable[[int], object]
"""Of the weight or the cache with that number."""


class _WithTorch(CachedRows):
    """Rows for torch's operations, whatever was built."""

    def _takes_native(self, like: Tensor, contexts: Sequence[int]) -> bool:
        return False


def seconds(calls: dict[str, tuple[Call, int]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of a call, each over as many numbers as are given with it."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):  # The first one warms up.
        for name, (call, count) in calls.items():
            began = time.thread_time()
            for number in range(count):
                call(number)
            if repeat:
                found[name].append((time.thread_time() - began) / count)
    return {name: median(times) for name, times in found.items()}


def products(
    outputs: int, inputs: int, num_bytes: int
) -> dict[str, tuple[torch.dtype, list[Callable[[Tensor], Tensor]]]]:
    """By name, the dtype of rows and enough layers to fill the bytes."""
    weights = [torch.randn(outputs, inputs) for _ in range(num_bytes // (4 * outputs * inputs) + 1)]
    halves = [weight.bfloat16() for weight in weights]
    found: dict[str, tuple[torch.dtype, list[Callable[[Tensor], Tensor]]]] = {
        "float32": (torch.float32, [Linear(weight) for weight in weights]),
        "float32, torch": (torch.float32, [lambda x, w=weight: F.linear(x, w) for weight in weights]),
        "bfloat16": (torch.bfloat16, [Linear(weight) for weight in halves]),
        "bfloat16, torch": (torch.bfloat16, [lambda x, w=weight: F.linear(x, w) for weight in halves]),
    }
    if native.multiplies_integers():
        half = torch.bfloat16
        found["w8a8"] = half, [_integers(outputs, inputs, 8, quantized_rows=True) for _ in weights]
        found["w8a16"] = half, [_integers(outputs, inputs, 8, quantized_rows=False) for _ in weights]
        found["4 bits"] = half, [_integers(outputs, inputs, 4, quantized_rows=False) for _ in weights]
    return found


def _product(layers: list[Callable[[Tensor], Tensor]], x_NI: Tensor, number: int) -> Tensor:
    return layers[number](x_NI)


def _integers(outputs: int, inputs: int, bits: int, *, quantized_rows: bool) -> IntLinear:
    groups = 1 if bits == 8 else inputs // GROUP
    return IntLinear(
        torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8),
        torch.rand(outputs, groups),
        torch.full((outputs, groups), 2.0 ** (bits - 1)),
        bits=bits,
        dtype=torch.bfloat16,
        quantized_rows=quantized_rows,
    )


def product_rates(rows: list[int], repeats: int, num_bytes: int) -> dict[str, dict[str, dict[int, float]]]:
    """GFLOP/s by shape, product and rows."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for shape, (outputs, inputs) in SHAPES.items():
        layers = products(outputs, inputs, num_bytes)
        rates = found[shape] = {name: {} for name in layers}
        for count in rows:
            x = torch.randn(count, inputs)
            calls: dict[str, tuple[Call, int]] = {}
            for name, (dtype, held) in layers.items():
                calls[name] = partial(_product, held, x.to(dtype)), len(held)
            for name, taken in seconds(calls, repeats).items():
                rates[name][count] = 2e-9 * count * outputs * inputs / taken
    return found


def attention_rates(tokens: list[int], repeats: int, num_bytes: int) -> dict[str, dict[str, dict[int, float]]]:
    """GB/s by heads, kernel and tokens of a sequence."""
    array = torch.ones(num_bytes // 4)
    found: dict[str, dict[str, dict[int, float]]] = {}
    for heads, (num_heads, num_kv_heads) in HEADS.items():
        rates = found[heads] = {}
        for count in tokens:
            size = 8 * SEQUENCES * count * num_kv_heads * HEAD_DIM
            calls: dict[str, tuple[Call, int]] = {"read": (lambda number: array.sum(), 1)}
            for name, scattered in (("blocks in order", False), ("blocks anywhere", True)):
                tables = _tables(count, num_heads, num_kv_heads, num_bytes // size + 1, scattered=scattered)
                calls[name] = tables.attention(CachedRows)
                calls[f"{name}, torch"] = tables.attention(_WithTorch)
            for name, taken in seconds(calls, repeats).items():
                moved = array.nbytes if name == "read" else size
                rates.setdefault(name, {})[count] = 1e-9 * moved / taken
    return found


@dataclass(frozen=True)
class Tables:
    """Keys and values `[L, R, D]` of as many layers, as the engine allocates them, and what attends to them."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    slots: NDArray[np.int64]
    num_kv_heads: int

    def attention(self, kind: type[CachedRows]) -> tuple[Call, int]:
        cached = kind(
            self.slots,
            [len(self.slots) // SEQUENCES] * SEQUENCES,
            num_heads=self.queries.shape[1],
            num_kv_heads=self.num_kv_heads,
            num_slots=self.keys.shape[1] // self.num_kv_heads,
            like=self.keys[0],
        )
        return partial(self._attend, cached), len(self.keys)

    def _attend(self, cached: CachedRows, layer: int) -> Tensor:
        return decode_attention(self.queries, self.keys[layer], self.values[layer], cached, scale=HEAD_DIM**-0.5)


def _tables(tokens: int, num_heads: int, num_kv_heads: int, layers: int, *, scattered: bool) -> Tables:
    """Blocks of a sequence are beside each other, or anywhere, as those of a server are after a while."""
    slots = SEQUENCES * -(-tokens // BLOCK) * BLOCK
    blocks = np.arange(slots // BLOCK)
    if scattered:
        np.random.default_rng(0).shuffle(blocks)
    slot_SN = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(SEQUENCES, -1)
    shape = (layers, num_kv_heads * slots, HEAD_DIM)
    keys, values = (in_huge_pages(torch.empty(shape)).normal_() for _ in range(2))
    return Tables(
        keys, values, torch.randn(SEQUENCES, num_heads, HEAD_DIM), slot_SN[:, :tokens].flatten(), num_kv_heads
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 32, 512])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 192, 512])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=128)
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = args.megabytes << 20
    flops, bandwidth = product_rates(args.rows, args.repeats, size), attention_rates(args.tokens, args.repeats, size)
    print(f"CPU kernels: {native.description()}\n")
    for title, heads, rates in (("GFLOP/s", args.rows, flops), ("GB/s", args.tokens, bandwidth)):
        rows = [
            (f"{what}, {name}", *(f"{rate:.0f}" for rate in by.values()))
            for what, names in rates.items()
            for name, by in names.items()
        ]
        print(table((title, *map(str, heads)), rows), end="\n\n")
    body = {"cpu_kernels": native.description(), "gflops_by_rows": flops, "gigabytes_by_tokens": bandwidth}
    print(f"record: {write_record('engine-kernels', body)}")


if __name__ == "__main__":
    main()
