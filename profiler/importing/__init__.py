"""Imported measurements: tables that others measured -> a Profile, and what there is to say about it.

    csv              one measurement a row, as is (`csv.py`)
    vidur            a layer by operation, attention, links, host times (`vidur.py`, `vidur_attention.py`)
    aiconfigurator   products, attention by heads, all-reduces (`aiconfigurator.py`)

Tables are recognised by their columns and may be mixed: rows of a plain CSV stand in front of all others of their op,
phase and degree, so that a table of sends or a measured overhead completes what a format lacks. Rows that were derived
rather than measured have `repeats` 0 and are counted. Not here: interpolation between rows (`simulator/`).
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from exeplan.core.models.layer_costs import layer_parameters
from exeplan.core.models.model import ModelSpec
from exeplan.core.models.uneven_routing import EVEN
from exeplan.core.profile import Measurement, Profile
from exeplan.core.schedule import Sharding
from exeplan.errors import InputError
from exeplan.files import shipped_names
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet
from exeplan.profiler.datasheets.roofline import Datasheet
from exeplan.profiler.importing import aiconfigurator, vidur, vidur_attention
from exeplan.profiler.importing.attention import attention_rows, within_windows
from exeplan.profiler.importing.csv import read_csv
from exeplan.profiler.importing.experts import expert_times
from exeplan.profiler.importing.imported_rows import ImportedRows, rounded
from exeplan.profiler.importing.lint import lint, refuse_falls, report, without_spikes
from exeplan.profiler.importing.tables import Table, read_tables

_STAND_IN = "a100-80gb"
"""Whose memory a device without a datasheet is given."""
_OVERHEAD_SEQS = tuple(2**i for i in range(12))
_COMPUTE = (
    ("attention", "prefill"),
    ("attention", "decode"),
    ("rest", ""),
    ("embed", ""),
    ("head", ""),
    ("overhead", "prefill"),
    ("overhead", "decode"),
)
"""What every profile needs; an encoder-decoder model's `rest` has both phases."""
_BOTH = ("prefill", "decode")
_COPIED = ("embed", "head", "overhead")
"""Where they lack a degree, rows of the next smaller one stand for it: they hardly shrink, or are small."""


def import_profile(
    paths: Sequence[Path],
    *,
    spec: ModelSpec,
    device: str,
    format: str = "auto",
    overhead_seconds: float | None = None,
    dtype: str = "bfloat16",
    routing: str | None = None,
) -> tuple[Profile, tuple[str, ...]]:
    """The profile of a model's layers on a device from tables, files or folders, and sentences to print.

    `device` names a datasheet, whose peaks bound every believable row. `overhead_seconds` is the host time of an
    iteration and stands in front of what the tables say. `routing` chooses among a table's experts (`experts.py`).
    Raises InputError for a file that is damaged, of another model or another format, for times that fall as the work
    grows, and where a needed op is missing.
    """
    sheet, known = _datasheet(device)
    tables, notes = read_tables(paths, device=sheet.name if known else device, format=format)
    formats = list(dict.fromkeys(table.format for table in tables))
    if formats != ["csv"]:
        _check_supported(formats, spec, dtype)
    if not known:
        shipped = ", ".join(shipped_names("devices"))
        lack = f"no datasheet of a device '{device}' (there are {shipped}, or give a YAML file)"
        if formats != ["csv"]:
            raise InputError(f"{lack}; what {' and '.join(formats)} tables do not time follows from it")
        notes.append(f"{lack}: its memory counts as that of {_STAND_IN}, and no row is held against its peaks")
    if routing is not None and (not spec.experts or formats == ["csv"]):
        raise InputError(f"routing '{routing}' chooses among tables of experts, which are not imported here")
    part = ImportedRows(notes=tuple(notes)) + _combined(tables, spec, sheet, overhead_seconds, dtype, routing)
    _check_complete(part.rows, spec, paths)
    described = _described(spec, sheet, dtype)
    findings = lint(part.rows, spec, dtype, described.device if known else None)
    profile = replace(
        described,
        device=described.device if known else replace(described.device, name=device),
        measurements=part.rows,
        routing=None if routing in (None, EVEN) else routing,
        source=f"imported {' and '.join(formats)}",
    )
    return profile, (*part.notes, *_counted(part.rows), *report(findings))


def _datasheet(device: str) -> tuple[Datasheet, bool]:
    """The datasheet of a name, of a file, or of the only shipped device with that chip; else the stand-in and False."""
    name = device.strip()
    if name.endswith((".yaml", ".yml")):
        return load_datasheet(name), True
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower())
    shipped = shipped_names("devices")
    fitting = [plain] if plain in shipped else [s for s in shipped if s.split("-")[0] == plain.split("-")[0]]
    return (load_datasheet(fitting[0]), True) if len(fitting) == 1 else (load_datasheet(_STAND_IN), False)


def _described(spec: ModelSpec, sheet: Datasheet, dtype: str) -> Profile:
    """Model, device and memory as the datasheet says. With fp8: layers of 1 byte a parameter at twice the peak."""
    if dtype != aiconfigurator.FP8:
        return profile_from_datasheet(spec, sheet, dtype=dtype, tensor_parallel_sizes=(1,))
    described = profile_from_datasheet(spec, sheet, dtype="bfloat16", tensor_parallel_sizes=(1,))
    return replace(
        described,
        dtype=dtype,
        device=replace(described.device, flops_per_second=2 * described.device.flops_per_second),
        weight_bytes=described.weight_bytes - spec.num_layers * layer_parameters(spec),
    )


def _check_supported(formats: Sequence[str], spec: ModelSpec, dtype: str) -> None:
    quantized = dtype == aiconfigurator.FP8 and set(formats) == {"aiconfigurator"}
    if dtype not in aiconfigurator.TWO_BYTES and not quantized:
        raise InputError(f"{' and '.join(formats)} tables time 2-byte elements, not {dtype}; take bfloat16 or float16")
    if (spec.latent or spec.experts) and "vidur" in formats:
        what = "latent attention" if spec.latent else "experts"
        raise InputError(
            f"{' and '.join(formats)} tables are not read for {what}, which {spec.name} has; use a datasheet, or a "
            "plain CSV"
        )
    if spec.is_encoder_decoder:
        raise InputError(
            f"{' and '.join(formats)} tables time decoder-only layers, and {spec.name} is an encoder-decoder model; "
            "measure it, give a plain CSV, or use a datasheet"
        )


def _combined(
    tables: Sequence[Table],
    spec: ModelSpec,
    sheet: Datasheet,
    overhead_seconds: float | None,
    dtype: str,
    routing: str | None,
) -> ImportedRows:
    """Rows of all tables; of an op, phase and degree only those of the first source that has it."""
    own = ImportedRows(*read_csv(*(table.path for table in _of(tables, "csv"))))
    refuse_falls(own.rows)
    layer = _layers(tables, spec, sheet, dtype, routing)
    degrees = sorted({row.tensor_parallel_size for row in (own + layer).rows if row.op == "rest"}) or [1]
    hosts = ImportedRows()
    if layer.rows or overhead_seconds or _of(tables, "overheads"):
        hosts = _overheads(tables, spec, sheet, degrees, overhead_seconds)
    kernels = [
        k
        for t in _of(tables, "attention", "attention_short")
        for k in vidur_attention.attention_kernels(t, sheet=sheet)
    ]
    kernels += [k for t in _of(tables, "heads") for k in aiconfigurator.attention_kernels(t, dtype)]
    links = vidur.links_part(_of(tables, "collective", "tokens_collective", "send", "tokens_send"))
    links += aiconfigurator.all_reduce_part(_of(tables, "all_reduce", "nccl"))
    attention = attention_rows(kernels, spec, degrees)
    if spec.latent:  # Tables by heads time keys and values of each head.
        attention = aiconfigurator.latent_part(
            _of(tables, "latent"), _of(tables, "latent_module"), spec, degrees, dtype
        )
    attention = within_windows(without_spikes(attention), spec)
    part = _first([own, *map(without_spikes, (hosts, layer, attention, links))])
    part += _copied(part.rows, degrees)
    if not any(row.op == "send" for row in part.rows):
        note = (
            "send: not in the tables; placements of several stages take the cluster's link, or add rows by a plain CSV"
        )
        part += ImportedRows(notes=(note,))
    return part


def _layers(
    tables: Sequence[Table], spec: ModelSpec, sheet: Datasheet, dtype: str, routing: str | None
) -> ImportedRows:
    layers, products = _of(tables, "layer"), _of(tables, "gemm")
    if layers:
        return vidur.layer_part(layers, spec, sheet=sheet)
    if not products:
        return ImportedRows()
    table_of = partial(
        aiconfigurator.gemm_table, products, flops=sheet.bfloat16_flops, bandwidth=sheet.memory_bandwidth
    )
    table = table_of(dtype=dtype)
    head = table_of(dtype="bfloat16") if dtype == aiconfigurator.FP8 else table
    degrees, times = aiconfigurator.possible_degrees(spec), None
    if spec.experts:
        times = expert_times(_of(tables, "experts"), spec, spec.experts, dtype, routing)
        degrees = [degree for degree in degrees if (degree, 1) in times.curves]
    if spec.latent:
        degrees = aiconfigurator.latent_degrees(_of(tables, "latent"), spec, degrees) or degrees
    return aiconfigurator.layer_part(table, head, spec, degrees, sheet=sheet, experts=times)


def _overheads(
    tables: Sequence[Table], spec: ModelSpec, sheet: Datasheet, degrees: Sequence[int], seconds: float | None
) -> ImportedRows:
    """As the option says, else as the tables, else as the datasheet."""
    measured = vidur.overhead_part(_of(tables, "overheads"), spec, degrees)
    if seconds is None and measured.rows:
        return measured
    each = sheet.host_seconds_per_sequence if seconds is None else 0.0
    fixed = sheet.host_seconds if seconds is None else seconds
    rows = tuple(
        Measurement(
            op="overhead",
            phase=phase,
            num_seqs=n,
            tensor_parallel_size=degree,
            seconds=rounded(fixed + n * each),
            repeats=0,
        )
        for degree in degrees
        for phase in ("prefill", "decode")
        for n in (_OVERHEAD_SEQS if each else (1,))
    )
    if seconds is not None:
        return ImportedRows(rows) + ImportedRows(
            tuple(row for row in measured.rows if row.op == "head"), measured.notes
        )
    note = (
        f"overhead: not in the tables; the datasheet's {fixed * 1e3:g} ms an iteration and {each * 1e6:g} us a sequence"
    )
    return ImportedRows(rows, (f"{note} assumed, --overhead sets it",))


def _of(tables: Sequence[Table], *kinds: str) -> list[Table]:
    return [table for table in tables if table.kind in kinds]


def _first(parts: Iterable[ImportedRows]) -> ImportedRows:
    """Rows of each op, phase and degree from the first part that has any; notes begin with the op they are about."""
    rows: list[Measurement] = []
    notes: list[str] = []
    for part in parts:
        taken = {(row.op, row.phase, row.sharding) for row in rows}
        apart = (of_phase for row in part.rows for of_phase in _apart(row, taken))
        kept = [row for row in apart if (row.op, row.phase, row.sharding) not in taken]
        displaced = {row.op for row in part.rows} - {row.op for row in kept}
        notes += [note for note in part.notes if note.split(":")[0] not in displaced]
        rows += kept
    return ImportedRows(tuple(rows), tuple(notes))


def _apart(row: Measurement, taken: Collection[tuple[str, str, Sharding]]) -> Iterator[Measurement]:
    """A row of `rest` for both phases as one of each where one of them is taken."""
    phases = _BOTH if row.op == "rest" and not row.phase else ()
    if any((row.op, phase, row.sharding) in taken for phase in phases):
        yield from (replace(row, phase=phase) for phase in phases)
    else:
        yield row


def _copied(rows: Sequence[Measurement], degrees: Sequence[int]) -> ImportedRows:
    """Rows for the degrees that `embed`, `head` or `overhead` lack."""
    copies: list[Measurement] = []
    notes = []
    for op in _COPIED:
        timed = sorted({row.tensor_parallel_size for row in rows if row.op == op})
        lacking = [degree for degree in degrees if degree not in timed] if timed else []
        for degree in lacking:
            source = max((t for t in timed if t < degree), default=timed[0])
            of_source = (row for row in rows if row.op == op and row.tensor_parallel_size == source)
            copies += [replace(row, tensor_parallel_size=degree, repeats=0) for row in of_source]
        if lacking:
            degrees_said = ", ".join(map(str, lacking))
            notes.append(
                f"{op}: not timed at tensor_parallel_size {degrees_said}; the next smaller degree stands for it"
            )
    return ImportedRows(tuple(copies), tuple(notes))


def _check_complete(rows: Sequence[Measurement], spec: ModelSpec, paths: Sequence[Path]) -> None:
    """Raises InputError naming every op that a profile needs and the tables lack."""
    where = ", ".join(map(str, paths))
    rest = ["rest prefill", "rest decode"] if spec.is_encoder_decoder else ["rest"]
    needed = [*(f"{op} {phase}".strip() for op, phase in _COMPUTE if op != "rest"), *rest]
    there = {f"{row.op} {phase}".strip() for row in rows for phase in ("", row.phase)}
    if missing := [name for name in needed if name not in there]:
        ways = ["add them as a plain CSV or another table"] if any("overhead" not in name for name in missing) else []
        ways += ["give --overhead TIME for the host's time of an iteration"] if "overhead decode" in missing else []
        raise InputError(f"{where}: no rows of {', '.join(missing)}; {', and '.join(ways)}")
    for degree in sorted({row.tensor_parallel_size for row in rows if row.op == "rest"}):
        own = [row for row in rows if row.tensor_parallel_size == degree]
        phases = {row.phase for row in own if row.op == "attention"}
        if lacking := [f"{phase} attention" for phase in _BOTH if phase not in phases]:
            raise InputError(
                f"{where}: rest is timed at tensor_parallel_size={degree}, {' and '.join(lacking)} not; add rows, or "
                "leave that degree out"
            )
        _check_degree(own, f"{where}: tensor_parallel_size={degree}")


def _check_degree(rows: Sequence[Measurement], where: str) -> None:
    """Raises InputError for a phase without `rest`, and for a single size, as any other would take as long."""
    for phase in _BOTH:
        own = [row for row in rows if row.phase in ("", phase)]
        for sharding in {row.sharding for row in rows if row.op == "rest"}:
            sizes = {row.num_tokens for row in own if row.op == "rest" and row.sharding == sharding}
            if not sizes:
                raise InputError(f"{where}: rest has no rows of {phase}; add them, or leave the phase of all empty")
            if len(sizes) == 1:
                raise InputError(
                    f"{where}: rest is timed at {min(sizes)} tokens only, so that any number of them would take as "
                    "long; add rows of other sizes, or leave that degree out"
                )
        axis = "num_tokens" if phase == "prefill" else "context_tokens"
        points = {(row.num_seqs, getattr(row, axis)) for row in own if row.op == "attention"}
        if len(points) == len({num_seqs for num_seqs, _ in points}):
            raise InputError(
                f"{where}: {phase} attention is timed at one length only, so that any other would take as long; add "
                "rows of the same num_seqs and other lengths, or leave that degree out"
            )


def _counted(rows: Sequence[Measurement]) -> list[str]:
    derived = [row for row in rows if row.repeats == 0]
    ops = dict.fromkeys(f"{row.op} {row.phase}".strip() for row in derived)
    what = f" ({', '.join(ops)})" if derived else ""
    degrees = ", ".join(map(str, sorted({row.tensor_parallel_size for row in rows if row.op == "rest"})))
    return [
        f"{len(rows) - len(derived)} rows measured, {len(derived)} derived{what}; tensor parallel degrees {degrees}"
    ]
