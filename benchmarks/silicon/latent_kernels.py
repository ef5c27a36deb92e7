"""Tables of latent attention's kernels for `plans/kernels`, from AIConfigurator's, and what they are worth.

    python -m benchmarks.silicon.latent_kernels --data FOLDER

FOLDER holds `h100_sxm/mla/trtllm/...` and `h200_sxm/...` as AIConfigurator publishes them, which need pyarrow. Taken
are TensorRT-LLM's kernels (`context_mla_perf`, `generation_mla_perf`): vLLM's were timed as whole modules only,
SGLang's of prompts in the absorbed form that its servers do not take, and those of vectors in fp8 dequantize them all.

Held against TensorRT-LLM's whole modules of DeepSeek-V3 (`mla_*_module_perf`: projections, norms, rotation, kernel),
which no table or constant has seen: the sheet's projections with its roofline of attention, and with the tables. Judged
are all batches that were timed. Writes the tables, and records/silicon-latent-kernels.json.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.record import write_record
from benchmarks.silicon.rows import DEVICES
from exeplan.core.models.model import DTYPE_BYTES, FP8, ModelSpec, load_model_spec
from exeplan.files import shipped, write_text
from exeplan.planner.reports.tables import table
from exeplan.profiler.datasheets.datasheet import latent_projection_seconds, load_datasheet
from exeplan.profiler.datasheets.latent_kernels import Kernel, latent_attention_seconds
from exeplan.profiler.datasheets.roofline import Datasheet, between_layers, elementwise_seconds

_VERSION = "1.3.0rc20"
_SYSTEMS = ("h100_sxm", "h200_sxm")
_TABLES = {"decode": ("generation_mla_perf", "step"), "prefill": ("context_mla_perf", "isl")}
_MODULES = {"decode": "mla_generation_module_perf", "prefill": "mla_context_module_perf"}
_DTYPES = (("bfloat16", "bfloat16"), ("fp8_block", FP8))
"""Of weights and of latent vectors, judged."""
_COLUMNS = ("device", "phase", "weights", "latent vectors", "modules", "roofline % / p90", "tables % / p90")
_HEAD = """# Latent attention of one layer on one {device}, microseconds: a row for sequences, a column for tokens of
# each, where decode counts the new one; by query heads. TensorRT-LLM {version}: tables context_mla_perf and
# generation_mla_perf of AIConfigurator 0.12.0, Copyright NVIDIA CORPORATION & AFFILIATES, Apache-2.0.
# Made by `python -m benchmarks.silicon.latent_kernels`.
source: TensorRT-LLM {version}
sizes: {{kv_rank: 512, nope_dim: 128, rope_dim: 64, value_dim: 128}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of operator tables")
    args = parser.parse_args()
    for system in _SYSTEMS:
        write_text(shipped("kernels", f"{DEVICES[system]}-latent"), _written(args.data, system))
    spec = load_model_spec("deepseek-v3")
    found = [row for system in _SYSTEMS for row in _judged(args.data, system, spec)]
    print(table(_COLUMNS, [tuple(str(row[name]) for name in _COLUMNS) for row in found]))
    print(f"record: {write_record('silicon-latent-kernels', {'rows': found})}")


def _read(data: Path, system: str, name: str) -> Any:
    import pandas

    return pandas.read_parquet(data / system / "mla" / "trtllm" / _VERSION / f"{name}.parquet")


def _written(data: Path, system: str) -> str:
    """The table as a YAML file."""
    lines = [_HEAD.format(device=DEVICES[system], version=_VERSION)]
    for phase, (name, axis) in _TABLES.items():
        frame = _read(data, system, name)
        tokens = sorted(frame[axis].unique())
        lines += [f"{phase}:\n  tokens: {' '.join(str(at + (phase == 'decode')) for at in tokens)}\n  microseconds:\n"]
        for dtype, of_dtype in frame.groupby("kv_cache_dtype"):
            lines.append(f"    {dtype}:\n")
            for heads, of_heads in of_dtype.groupby("num_heads"):
                grid = of_heads.pivot_table(index="batch_size", columns=axis, values="latency", aggfunc="median")
                grid = grid.reindex(columns=tokens)
                lines.append(f"      {heads}:\n")
                lines += [
                    f"        {n}: {' '.join(map(_cell, row))}\n"
                    for n, row in zip(grid.index, grid.values, strict=True)
                ]
    return "".join(lines)


def _cell(milliseconds: float) -> str:
    return f"{1e3 * milliseconds:.4g}" if np.isfinite(milliseconds) else "-"


def _judged(data: Path, system: str, spec: ModelSpec) -> Iterator[dict[str, object]]:
    """A row for each phase and dtype: medians and 90th percentiles of the error, in percent."""
    sheet = load_datasheet(DEVICES[system])
    for phase, name in _MODULES.items():
        modules = _read(data, system, name)
        for weights, cached in _DTYPES:
            chosen = modules[(modules.gemm_type == weights) & (modules.kv_cache_dtype == cached)]
            ways = {"roofline % / p90": replace(sheet, latent_kernels=""), "tables % / p90": sheet}
            found = {way: _errors(chosen, spec, of_sheet, phase, weights, cached) for way, of_sheet in ways.items()}
            start = (sheet.name, phase, weights, cached, len(chosen))
            yield dict(zip(_COLUMNS, (*start, *found.values()), strict=True))


def _errors(modules: Any, spec: ModelSpec, sheet: Datasheet, phase: str, weights: str, cached: str) -> str:
    predicted = [
        _module_seconds(spec, sheet, phase, weights, cached, int(row.num_heads), int(row.batch_size), int(tokens))
        for row, tokens in zip(modules.itertuples(), modules[_TABLES[phase][1]], strict=True)
    ]
    errors = np.abs(np.array(predicted) / modules.latency.to_numpy() * 1e3 - 1)
    return " / ".join(f"{100 * np.quantile(errors, share):.1f}" for share in (0.5, 0.9))


def _module_seconds(
    spec: ModelSpec, sheet: Datasheet, phase: str, weights: str, cached: str, heads: int, num_seqs: int, tokens: int
) -> float:
    assert spec.latent
    dtype = FP8 if weights.startswith(FP8) else weights
    new, size = num_seqs * (tokens if phase == "prefill" else 1), spec.num_heads // heads
    kernel = Kernel(phase=phase, latent=spec.latent, compute_dtype=between_layers(dtype), dtype=cached)
    return (
        latent_projection_seconds(spec, spec.latent, sheet, dtype, size, new)
        + latent_attention_seconds(sheet, kernel, heads=heads, num_seqs=num_seqs, tokens=tokens)
        + elementwise_seconds(sheet, 2 * new * spec.latent.kept * DTYPE_BYTES[cached])
    )


if __name__ == "__main__":
    main()
