"""AIConfigurator's tables (ai-dynamo/aiconfigurator): milliseconds, elements of 2 bytes or fp8; its own or tidied ones.

    gemm         products of m tokens, n outputs and k inputs, out of memory (weights are not in the cache)
    heads        attention of one layer, heads of one GPU. Prefill: whole prompts of `isl` tokens. Decode: `isl` is 1,
                 and `kv_len` (or `step` + 1) counts the new token too
    latent       latent attention of DeepSeek's sizes, heads of one GPU: its kernel alone. Whole modules, with their
                 projections, are left aside
    experts      one layer's experts on one GPU (`experts.py`)
    all_reduce   `message_size` counts elements, not bytes; kernels launched one by one (eager) or in a CUDA graph
    nccl         the same by NCCL alone, and other collectives

A layer is the sum of its products (query-key-value, output, gate and up, down; with latent attention those down to the
vectors and up from them) of the shard, and of the kernels that no table times (`pointwise.py`). With dtype fp8 the
layer's products are those with scales for blocks of the weights (`fp8_block`), or for whole tensors (`fp8`) where the
others were timed with their launches, as vLLM's were; the KV cache is in fp8, and the output head and what is summed
over a group stay in 2 bytes.
Nothing here times a send between stages, nor the host.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.models.model import ModelSpec
from exeplan.core.profile import Measurement
from exeplan.errors import InputError
from exeplan.profiler.datasheets.roofline import Datasheet, gemm_seconds
from exeplan.profiler.importing.attention import Kernels, shard_shape
from exeplan.profiler.importing.experts import ExpertTimes
from exeplan.profiler.importing.gemm import Gemms, gemms
from exeplan.profiler.importing.imported_rows import ImportedRows, rounded
from exeplan.profiler.importing.pointwise import embed_seconds, layer_seconds, sampling_seconds
from exeplan.profiler.importing.tables import Table, numbers

_MS = 1e-3
_ELEMENT_BYTES = 2
TWO_BYTES = ("bfloat16", "float16", "half")
FP8 = "fp8"
_FP8_BLOCKS, _FP8_TENSORS = ("fp8_block",), ("fp8",)
_LAUNCHED = 3.0
"""From this ratio between their shortest products on, those with scales for blocks were timed with their launches."""
_DEGREES = (1, 2, 4, 8)
_LATENT = (512, 128, 64, 128)
"""Widths of the latent attention that the tables time: DeepSeek-V2's and later, and Kimi's."""
_MOST_ROWS = 2048
"""Rows of the output head at most."""


def gemm_table(tables: Iterable[Table], *, flops: float, bandwidth: float, dtype: str = "bfloat16") -> Gemms:
    """All products in the dtype."""
    columns: list[list[Floats]] = [[], [], [], []]
    for table in tables:
        kept = _fp8_products(table) if dtype == FP8 else _kept(table, "gemm_dtype", TWO_BYTES)
        for column, name in zip(columns, ("m", "n", "k", "latency"), strict=True):
            column.append(numbers(kept, name))
    m, n, k, latency = map(np.concatenate, columns)
    return gemms(m, n, k, _MS * latency, flops=flops, bandwidth=bandwidth)


def _fp8_products(table: Table) -> Table:
    there = set(_stated(table, "gemm_dtype").frame["gemm_dtype"])
    blocks = _kept(table, "gemm_dtype", _FP8_BLOCKS if there & {*_FP8_BLOCKS} else _FP8_TENSORS)
    if not there & {*_FP8_TENSORS}:
        return blocks
    tensors = _kept(table, "gemm_dtype", _FP8_TENSORS)
    shortest, least = (float(numbers(kept, "latency").min()) for kept in (blocks, tensors))
    return tensors if shortest > _LAUNCHED * least else blocks


def possible_degrees(spec: ModelSpec) -> list[int]:
    """Those that split heads, key/value heads and the MLP evenly."""
    return [
        degree
        for degree in _DEGREES
        if spec.num_heads % degree == spec.intermediate_size % degree == 0
        and (spec.num_kv_heads % degree == 0 or degree % spec.num_kv_heads == 0)
    ]


def layer_part(
    table: Gemms,
    head: Gemms,
    spec: ModelSpec,
    degrees: Sequence[int],
    *,
    sheet: Datasheet,
    experts: ExpertTimes | None = None,
) -> ImportedRows:
    """`rest`, `embed` and `head` of a decoder-only model's shards, at the measured numbers of tokens.

    The output head's product comes from a table of its own, and so do the experts of a layer that has some: `rest` is
    the mean layer's then.
    """
    rows: list[Measurement] = []
    missing: list[tuple[int, int]] = []
    lacking = {"rest": 0, "head": 0}
    for degree in degrees:
        products, logits = layer_products(spec, degree), (-(-spec.vocab_size // degree), spec.hidden_size)
        mixed, divided = np.zeros(len(table.m)), dict[int, Floats]()
        if experts:
            parts = [one for one in dict.fromkeys((1, degree)) if (degree, one) in experts.curves]
            products = attention_products(spec, degree)  # The MLP's are in what is mixed.
            divided = {one: _mixture(spec, degree, one, table, experts, sheet) for one in parts}
            mixed = divided.pop(1)
        asked = [*((product, table) for product in products), (logits, head)]
        missing += [product for product, of in asked if product not in missing and not of.measured(*product)]
        shared = sum((table.seconds(n, k) for n, k in products), start=mixed)
        times = {1: shared} | {one: shared - mixed + seconds for one, seconds in divided.items()}
        whole = np.isfinite(sum(times.values(), start=np.zeros(len(table.m))))
        lacking["rest"] += int((~whole).sum())
        rows += _rest_rows(table.m[whole], spec, degree, sheet, shared[whole])
        for one in divided:
            further = _rest_rows(table.m[whole], spec, degree, sheet, times[one][whole])
            rows += [replace(row, expert_parallel_size=one) for row in further if row.op == "rest"]
        seconds = head.seconds(*logits)
        timed = np.isfinite(seconds)
        lacking["head"] += int((~timed).sum())
        rows += _head_rows(head.m[timed], spec, degree, sheet, seconds[timed])
    if not any(row.op == "rest" for row in rows):
        raise InputError(
            f"the tables time all products of a layer of {spec.name} at no number of tokens; add the others"
        )
    return ImportedRows(
        tuple(rows),
        (
            "rest: a layer's products from the table, and its norms, rotary embedding and activation by memory "
            "bandwidth; head: its product, and sampling by memory bandwidth",
            *((experts.note,) if experts else ()),
            *_interpolated(table, missing),
            *(
                f"{op}: {count} sizes over all degrees are left out, as the table lacks a product of theirs"
                for op, count in lacking.items()
                if count
            ),
        ),
    )


def _mixture(spec: ModelSpec, degree: int, parts: int, table: Gemms, times: ExpertTimes, sheet: Datasheet) -> Floats:
    """Seconds of the mean layer's MLP: experts, in so many parts of whole ones, router and shared experts in those that
    have them, a dense one in the others."""
    assert spec.experts
    dense = mlp_products(spec, degree)
    sparse = times.seconds(degree, parts, table.m)
    sparse = sparse + [gemm_seconds(sheet, "bfloat16", m, spec.experts.count, spec.hidden_size) for m in table.m]
    if width := spec.experts.shared_width // degree:
        sparse = sparse + table.seconds(2 * width, spec.hidden_size) + table.seconds(spec.hidden_size, width)
    share = spec.experts.num_layers / spec.num_layers
    if share == 1:
        return sparse
    return share * sparse + (1 - share) * sum(table.seconds(n, k) for n, k in dense)


def layer_products(spec: ModelSpec, degree: int) -> list[tuple[int, int]]:
    """(n, k) of all products of one device's dense layer."""
    return [*attention_products(spec, degree), *mlp_products(spec, degree)]


def attention_products(spec: ModelSpec, degree: int) -> list[tuple[int, int]]:
    """(n, k) of query-key-value and output; of latent attention those down to the vectors, up to queries, up to keys
    and values (absorbed, as many operations) and of the output."""
    queries, keys, dimension = shard_shape(spec, degree)
    if not (latent := spec.latent):
        return [((queries + 2 * keys) * dimension, spec.hidden_size), (spec.hidden_size, queries * dimension)]
    return [
        ((latent.query_rank or 0) + latent.kept, spec.hidden_size),
        (queries * dimension, latent.query_rank or spec.hidden_size),
        (queries * (latent.nope_dim + latent.value_dim), latent.kv_rank),
        (spec.hidden_size, queries * latent.value_dim),
    ]


def mlp_products(spec: ModelSpec, degree: int) -> list[tuple[int, int]]:
    """(n, k) of a dense layer's gate and up, and down projection."""
    width = spec.intermediate_size // degree
    return [((2 if spec.gated_mlp else 1) * width, spec.hidden_size), (spec.hidden_size, width)]


def _rest_rows(
    num_tokens: Floats, spec: ModelSpec, degree: int, sheet: Datasheet, products: Floats
) -> Iterator[Measurement]:
    row = partial(Measurement, tensor_parallel_size=degree, repeats=0)
    for tokens, layer in zip(num_tokens.astype(int).tolist(), products, strict=True):
        rest = float(layer) + layer_seconds(sheet, spec, tokens, degree)
        yield row(op="rest", num_tokens=tokens, seconds=rounded(rest))
        yield row(op="embed", num_tokens=tokens, seconds=rounded(embed_seconds(sheet, spec, tokens)))


def _head_rows(
    num_seqs: Floats, spec: ModelSpec, degree: int, sheet: Datasheet, products: Floats
) -> Iterator[Measurement]:
    row = partial(Measurement, tensor_parallel_size=degree, repeats=0)
    for seqs, logits in zip(num_seqs.astype(int).tolist(), products, strict=True):
        if seqs <= _MOST_ROWS:
            seconds = float(logits) + sampling_seconds(sheet, spec, seqs)
            yield row(op="head", num_seqs=seqs, seconds=rounded(seconds))


def _interpolated(table: Gemms, missing: Sequence[tuple[int, int]]) -> list[str]:
    if not missing:
        return []
    sizes = ", ".join(f"{n}x{k}" for n, k in missing)
    if not len(table.misses):
        return [f"products of n x k = {sizes} are not in the table: taken from their neighbours"]
    median, most = np.quantile(table.misses, [0.5, 0.9])
    return [
        f"products of n x k = {sizes} are not in the table: interpolated, or beyond it extrapolated; measured sizes "
        f"left out are missed by {median:.1%} (median), {most:.1%} (90th percentile)"
    ]


def attention_kernels(table: Table, dtype: str) -> list[Kernels]:
    """The kernels of one table, all of one phase. With fp8 the queries are too where there are such kernels."""
    if dtype == FP8:
        kept = _kept(_stated(table, "kv_cache_dtype"), "kv_cache_dtype", (FP8,))
        both = FP8 in set(_stated(kept, "attn_dtype").frame["attn_dtype"])
        kept = _kept(kept, "attn_dtype", (FP8,) if both else TWO_BYTES)
    else:
        kept = _kept(_kept(table, "attn_dtype", TWO_BYTES), "kv_cache_dtype", TWO_BYTES)
    kept = _kept(kept, "window_size", (0, -1))
    prompts = numbers(kept, "isl")
    decode = bool((prompts == 1).all())
    if decode:
        tokens = numbers(kept, "step") if "step" in kept.frame.columns else numbers(kept, "kv_len") - 1
    else:
        tokens = prompts
    heads = np.stack([numbers(kept, name).astype(int) for name in ("n_q_head", "n_kv_head", "head_dim")], axis=1)
    arrays = (heads, numbers(kept, "batch_size"), tokens, np.zeros(len(tokens)), _MS * numbers(kept, "latency"))
    chosen = tokens > 0
    return [Kernels("decode" if decode else "prefill", *(array[chosen] for array in arrays), notes=())]


def latent_part(
    tables: Iterable[Table], modules: Sequence[Table], spec: ModelSpec, degrees: Sequence[int], dtype: str
) -> ImportedRows:
    """`attention` of both phases with the latent vectors in fp8, or in 2 bytes, at the degrees whose heads were timed.

    Raises InputError for a model whose heads are of other widths than those that the tables time.
    """
    assert spec.latent
    part, latent = ImportedRows(), spec.latent
    sizes = (latent.kv_rank, latent.nope_dim, latent.rope_dim, latent.value_dim)
    if modules:
        left = ", ".join(sorted({table.path.name for table in modules}))
        part += ImportedRows(notes=(f"attention: whole modules of latent attention are left aside ({left})",))
    for table in tables:
        if sizes != _LATENT:
            timed, wanted = ("/".join(map(str, widths)) for widths in (_LATENT, sizes))
            raise InputError(
                f"{table.path} times latent attention of {timed} (kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, "
                f"v_head_dim), {spec.name} has {wanted}"
            )
        part += ImportedRows(tuple(_latent_rows(table, spec, degrees, dtype)))
    return part


def latent_degrees(tables: Iterable[Table], spec: ModelSpec, degrees: Sequence[int]) -> list[int]:
    """Those of the degrees whose heads the tables time."""
    heads = {int(count) for table in tables for count in numbers(table, "n_q_head")}
    return [degree for degree in degrees if spec.num_heads // degree in heads]


def _latent_rows(table: Table, spec: ModelSpec, degrees: Sequence[int], dtype: str) -> Iterator[Measurement]:
    kept = _kept(table, "kv_cache_dtype", (FP8,) if dtype == FP8 else TWO_BYTES)
    frame = kept.frame.assign(
        heads=numbers(kept, "n_q_head"), num_seqs=numbers(kept, "batch_size"), seconds=_MS * numbers(kept, "latency")
    )
    decode = bool((numbers(kept, "isl") == 1).all())
    frame["tokens"] = numbers(kept, "step" if decode else "isl", positive=False)
    times = frame[frame["tokens"].between(1, spec.max_context)].groupby(["heads", "num_seqs", "tokens"])["seconds"]
    for (heads, num_seqs, tokens), seconds in times.median().items():
        for degree in degrees:
            if spec.num_heads == degree * heads:
                yield Measurement(
                    op="attention",
                    phase="decode" if decode else "prefill",
                    num_seqs=int(num_seqs),
                    tensor_parallel_size=degree,
                    seconds=rounded(seconds),
                    **{"context_tokens" if decode else "num_tokens": int(num_seqs * tokens)},
                )


def all_reduce_part(tables: Iterable[Table]) -> ImportedRows:
    """`all_reduce` inside a node. CUDA graphs where the table has them, else the fastest kernel of each size."""
    import pandas

    found = [_all_reduce_times(table) for table in tables]
    if not found:
        return ImportedRows()
    times = pandas.concat(found, ignore_index=True)
    graphs = times[times["graph"]]
    note = "all_reduce: message sizes count elements of 2 bytes; "
    if len(graphs):
        times, note = graphs, note + "kernels in CUDA graphs, as launches hide behind other kernels where none run"
    else:
        note += "the fastest kernel of each size"
    fastest = times.groupby(["source", "degree", "bytes"])["seconds"].median().groupby(level=[1, 2]).min()
    rows = tuple(
        Measurement(
            op="all_reduce", phase="intra", tensor_parallel_size=int(degree), bytes=int(size), seconds=rounded(seconds)
        )
        for (degree, size), seconds in fastest.items()
    )
    return ImportedRows(rows, (note,))


def _all_reduce_times(table: Table) -> Any:
    import pandas

    kept = _kept(table, "op_name", ("all_reduce",))
    for name in ("nccl_dtype", "allreduce_dtype"):
        kept = _kept(kept, name, TWO_BYTES)
    source = [name for name in ("kernel_source", "backend", "implementation") if name in kept.frame.columns]
    names = (
        kept.frame[source].astype(str).agg(" ".join, axis=1) if source else pandas.Series("", index=kept.frame.index)
    )
    return pandas.DataFrame(
        {
            "source": names.to_numpy(),
            "graph": names.str.contains("graph").to_numpy(),
            "degree": numbers(kept, "num_gpus").astype(int),
            "bytes": (_ELEMENT_BYTES * numbers(kept, "message_size")).astype(int),
            "seconds": _MS * numbers(kept, "latency"),
        }
    )


def _stated(table: Table, column: str) -> Table:
    """The table itself. Raises InputError where it does not say its dtype, which is one of 2 bytes then."""
    if column not in table.frame.columns:
        raise InputError(f"{table.path} has no column {column}: its times are of 2-byte elements, not of fp8")
    return table


def _kept(table: Table, column: str, values: Sequence[object]) -> Table:
    """The rows whose column has one of the values; all of them where there is no such column."""
    if column not in table.frame.columns:
        return table
    frame = table.frame[table.frame[column].isin(values)]
    if not len(frame):
        there = ", ".join(sorted(map(str, set(table.frame[column]))))
        raise InputError(f"{table.path}: no row has {column} of {' or '.join(map(str, values))}, only {there}")
    return Table(table.path, table.kind, frame)
