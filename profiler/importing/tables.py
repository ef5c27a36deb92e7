"""Tables: the files a user names, read with pandas, each recognised by its columns.

    csv             csv      the plain CSV of one measurement a row (read by `csv.py`, not here)
    layer           vidur    per-operation times of one layer's shard
    attention       vidur    Vidur's attention.csv; `attention_short`: the same with one column of medians
    collective, send, tokens_collective, tokens_send, overheads     vidur    links and host times
    gemm, heads, latent, latent_module, experts, all_reduce, nccl   aiconfigurator

A folder stands for all tables under it. Where files of several GPUs lie together, those of the named device are taken.
"""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from exeplan.errors import InputError
from exeplan.profiler.importing.csv import COLUMNS, read_lines

FORMATS = ("csv", "vidur", "aiconfigurator")
_SUFFIXES = (".csv", ".csv.gz", ".parquet")
_KINDS: dict[str, tuple[str, frozenset[str]]] = {
    kind: (format, frozenset(columns.split()))
    for kind, format, columns in (
        (
            "layer",
            "vidur",
            "time_stats.mlp_up_proj.median num_tokens num_tensor_parallel_workers n_embd n_expanded_embd",
        ),
        ("attention", "vidur", "time_stats.attn_decode.median n_q_head n_kv_head batch_size kv_cache_size"),
        ("attention_short", "vidur", "median_ms tp n_q_head n_kv_head head_dim phase batch_size kv_cache_size"),
        ("collective", "vidur", "time_stats.all_reduce.median num_workers size devices_per_node"),
        ("tokens_collective", "vidur", "time_stats.all_reduce.median num_workers n_embd num_tokens"),
        ("send", "vidur", "time_stats.send_recv.median size devices_per_node"),
        ("tokens_send", "vidur", "time_stats.send_recv.median n_embd num_tokens num_tensor_parallel_workers"),
        ("overheads", "vidur", "sampler_e2e_median prepare_inputs_e2e_median batch_size tensor_parallel_degree"),
        ("gemm", "aiconfigurator", "m n k latency"),
        ("heads", "aiconfigurator", "batch_size isl n_q_head n_kv_head head_dim latency"),
        ("latent_module", "aiconfigurator", "batch_size isl step n_q_head mla_dtype gemm_type latency"),
        ("latent", "aiconfigurator", "batch_size isl step n_q_head mla_dtype latency"),
        (
            "experts",
            "aiconfigurator",
            "num_tokens hidden_size inter_size topk num_experts moe_tp_size latency",
        ),
        ("nccl", "aiconfigurator", "nccl_dtype num_gpus message_size latency"),
        ("all_reduce", "aiconfigurator", "num_gpus message_size latency"),
    )
}
_SPELLINGS = {"latency_ms": "latency", "num_heads": "n_q_head", "num_key_value_heads": "n_kv_head"}
"""AIConfigurator's own tables and tidied ones name the same column differently."""
_CHIP = re.compile(r"(?<![a-z0-9])((?:gb|gh|mi|rtx|[ahlvtb])\d{2,4}[a-z]?)(?![a-z0-9])")
_VERSION = re.compile(r"(vllm|trtllm|sglang|nccl)/(\d[\w.]*)/")


@dataclass(frozen=True, slots=True)
class Table:
    """One file; `frame` is a pandas DataFrame, and None for a plain CSV, which has its own reader."""

    path: Path
    kind: str
    frame: Any

    @property
    def format(self) -> str:
        return "csv" if self.kind == "csv" else _KINDS[self.kind][0]


def read_tables(paths: Sequence[Path], *, device: str, format: str) -> tuple[list[Table], list[str]]:
    """The tables of these files and folders, and sentences about what was chosen or left aside.

    Raises InputError for a file that is missing, cut short or of no known format, and where several GPUs lie together
    and the device names none of them.
    """
    if format not in ("auto", *FORMATS):
        raise InputError(f"no format '{format}' of measurements; there are auto, {', '.join(FORMATS)}")
    named = [found for path in paths for found in _files(path)]
    named, notes = _of_device(named, device)
    found = [(place, kind) for place in named if (kind := _kind(place, format)) is not None]
    if not found:
        raise InputError(f"{', '.join(map(str, paths))}: no table of {_formats(format)} there")
    found, chosen = _newest(found)
    return [Table(place.path, kind, None if kind == "csv" else _frame(place.path)) for place, kind in found], [
        *notes,
        *chosen,
    ]


@dataclass(frozen=True, slots=True)
class _Place:
    """A file, and the part of its path that may name its GPU; `given` when the user named the file itself."""

    path: Path
    label: str
    given: bool

    @property
    def chip(self) -> str | None:
        found = _CHIP.search(self.label.lower().replace("_", "-"))
        return found[1] if found else None


def _files(path: Path) -> list[_Place]:
    if not path.is_dir():
        return [_Place(path, path.name, True)]
    found = sorted(p for p in path.rglob("*") if p.name.endswith(_SUFFIXES) and p.is_file())
    tidy = [p for p in found if p.suffix != ".parquet"]
    if not find_spec("pyarrow") and found and not tidy:
        raise InputError(f"{path} holds parquet tables only, which need pyarrow: pip install pyarrow")
    if find_spec("pyarrow") and not any(".gemm." in p.name for p in tidy):
        tidy = found
    return [_Place(p, str(p.relative_to(path)), False) for p in tidy]


def _of_device(places: list[_Place], device: str) -> tuple[list[_Place], list[str]]:
    """Without the files of other GPUs where files of several lie together."""
    wanted = _CHIP.search(device.lower().replace("_", "-"))
    chips = sorted({place.chip for place in places if place.chip})
    if not chips or (wanted and chips == [wanted[1]]):
        return places, []
    if wanted and wanted[1] in chips:
        kept = [place for place in places if place.chip in (None, wanted[1])]
        return kept, [
            f"tables of {wanted[1]} taken, those of {', '.join(c for c in chips if c != wanted[1])} left aside"
        ]
    if len(chips) > 1:
        raise InputError(f"the tables are of {', '.join(chips)}, none of them of device '{device}'; name one of these")
    return places, [f"the tables say {chips[0]}, the device is '{device}': they count as its own"]


def _kind(place: _Place, format: str) -> str | None:
    """What the columns say; None for a file in a folder that is something else."""
    columns = _header(place.path)
    fitting = [kind for kind, (of, needed) in _KINDS.items() if needed <= columns and format in ("auto", of)]
    if fitting:
        return fitting[0]
    if format == "csv" or (format == "auto" and len(columns & set(COLUMNS)) > len(COLUMNS) // 2):
        return "csv"
    if not place.given:
        return None
    raise InputError(
        f"{place.path} is no table of {_formats(format)}: its columns are {', '.join(sorted(columns))[:200]}"
    )


def _formats(format: str) -> str:
    return "a known format (csv, vidur, aiconfigurator)" if format == "auto" else f"format {format}"


def _newest(found: list[tuple[_Place, str]]) -> tuple[list[tuple[_Place, str]], list[str]]:
    """Of upstream's tables by engine and version, vLLM's newest."""
    versions: dict[str, set[tuple[bool, tuple[int, ...], str]]] = {}
    for place, kind in found:
        if match := _VERSION.search(str(place.path)):
            number = tuple(int(part) for part in re.findall(r"\d+", match[2]))
            versions.setdefault(kind, set()).add((match[1] == "vllm", number, match[0]))
    best = {kind: max(choices)[2] for kind, choices in versions.items()}
    kept = [
        (place, kind)
        for place, kind in found
        if kind not in best or not _VERSION.search(str(place.path)) or best[kind] in str(place.path)
    ]
    return kept, [f"{kind}: tables of {engine.rstrip('/')}" for kind, engine in sorted(best.items())]


def _header(path: Path) -> set[str]:
    packed = path.suffix == ".parquet"
    columns = list(_parquet(path).columns) if packed else read_lines(path, 1)[0].split(",")
    return {_SPELLINGS.get(column.strip(), column.strip()) for column in columns}


def _frame(path: Path) -> Any:
    import pandas

    try:
        frame = _parquet(path) if path.suffix == ".parquet" else pandas.read_csv(path)
    except (pandas.errors.ParserError, pandas.errors.EmptyDataError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is not a whole CSV table: {str(error).strip().splitlines()[-1]}") from None
    if not len(frame):
        raise InputError(f"{path} holds no rows")
    return frame.rename(columns=lambda name: _SPELLINGS.get(str(name).strip(), str(name).strip()))


def _parquet(path: Path) -> Any:
    import pandas

    if not find_spec("pyarrow"):
        raise InputError(f"{path} is a parquet table, which needs pyarrow: pip install pyarrow")
    try:
        return pandas.read_parquet(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a whole parquet table: {str(error).splitlines()[0]}") from None


def cells(table: Table, column: str) -> Any:
    """A column as it was read. Raises InputError where the table has none of that name."""
    if column not in table.frame.columns:
        raise InputError(f"{table.path} has no column {column}, without which it cannot be read")
    return table.frame[column]


def numbers(table: Table, column: str, *, positive: bool = True) -> Any:
    """A column as floats. Raises InputError where it is not there, and naming the line of what is no number, not
    finite, negative, or 0."""
    import numpy
    import pandas

    found = cells(table, column)
    values = pandas.to_numeric(found, errors="coerce").to_numpy(dtype=float)
    wrong = numpy.flatnonzero(~(numpy.isfinite(values) & ((values > 0) if positive else (values >= 0))))
    if len(wrong):
        row = int(wrong[0])
        more = f" (and {len(wrong) - 1} more rows)" if len(wrong) > 1 else ""
        least = "above 0" if positive else "of at least 0"
        raise InputError(
            f"{table.path} line {row + 2}: {column} must be a finite number {least}, found {found.iloc[row]!r}{more}"
        )
    return values
