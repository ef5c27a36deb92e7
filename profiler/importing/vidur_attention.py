"""Vidur's attention tables: milliseconds of one layer's attention, heads counted before their split among the workers.

A pass is its kernel (`attn_decode` or `attn_prefill`), the store of its keys and values, and reshapes. Tables of some
engines store a prompt's keys and values block by block (0.87 ms for 1024 tokens of a 7B model on an A800, 20 GB/s): no
more than the datasheet's time of an element-wise kernel counts for it. `attention_short` is a table of the kernels'
medians alone.
"""

from typing import Any

import numpy as np

from exeplan.profiler.datasheets.roofline import Datasheet, elementwise_seconds
from exeplan.profiler.importing.attention import Kernels
from exeplan.profiler.importing.tables import Table, numbers

_MS = 1e-3
_STORE = "attn_kv_cache_save"
_RESHAPES = ("attn_input_reshape", "attn_output_reshape")
_STORED_BYTES = 8
"""Of one element of a head: key and value of two bytes, read and written."""
_SLOW = 3.0
"""Times the datasheet's time from which on a store is said to be slow."""


def attention_kernels(table: Table, *, sheet: Datasheet) -> list[Kernels]:
    """Decode and prefill kernels of the table."""
    new, cached = (numbers(table, name, positive=False) for name in ("prefill_chunk_size", "kv_cache_size"))
    batch, shapes = numbers(table, "batch_size"), _shapes(table)
    found = []
    for phase, tokens in (("decode", cached), ("prefill", new)):
        stored = _STORED_BYTES * batch * np.maximum(new, 1.0) * shapes[:, 1] * shapes[:, 2]
        limit = elementwise_seconds(sheet, stored)
        seconds, notes = _seconds(table, phase, limit)
        chosen = (seconds > 0) & (tokens > 0) & ((new > 0) == (phase == "prefill"))
        if chosen.any():
            before = cached if phase == "prefill" else np.zeros_like(cached)
            arrays = (shapes, batch, tokens, before, seconds)
            found.append(Kernels(phase, *(array[chosen] for array in arrays), notes=notes))
    return found


def _shapes(table: Table) -> Any:
    """[rows, 3]: query heads, key/value heads and head dimension of one worker."""
    short = table.kind == "attention_short"
    degree = numbers(table, "tp" if short else "num_tensor_parallel_workers").astype(int)
    queries, keys = (numbers(table, name).astype(int) for name in ("n_q_head", "n_kv_head"))
    dimension = numbers(table, "head_dim").astype(int) if short else numbers(table, "n_embd").astype(int) // queries
    return np.stack([np.maximum(1, queries // degree), np.maximum(1, keys // degree), dimension], axis=1)


def _seconds(table: Table, phase: str, limit: Any) -> tuple[Any, tuple[str, ...]]:
    """Of every row; 0 where the row is of the other phase."""
    if table.kind == "attention_short":
        return _MS * numbers(table, "median_ms"), ()
    kernel = _column(table, f"attn_{phase}")
    store = _column(table, _STORE)
    notes: tuple[str, ...] = ()
    if phase == "prefill":
        slow = (kernel > 0) & (store > _SLOW * limit)
        if slow.any():
            notes = (
                f"attention: storing keys and values of a prefill took up to {np.max((store / limit)[slow]):.0f} times "
                f"what memory takes in {table.path}; the datasheet's time counts instead",
            )
        store = np.minimum(store, limit)
    total = kernel + store + sum(_column(table, part) for part in _RESHAPES)
    return np.where(kernel > 0, total, 0.0), notes


def _column(table: Table, operation: str) -> Any:
    """Seconds; 0 where a row has none of it, as a pass without prefills has no prefill kernel."""
    name = f"time_stats.{operation}.median"
    if name not in table.frame.columns:
        return np.zeros(len(table.frame))
    filled = Table(table.path, table.kind, table.frame.assign(**{name: table.frame[name].fillna(0.0)}))
    return _MS * numbers(filled, name, positive=False)
