"""Reading workloads: traces, law files, shipped names and laws written on the command line.

    trace.csv, trace.jsonl, either .gz    input_tokens, output_tokens and optionally arrival_s, one request a row
    law.yaml                              a law, as a mapping (the files under plans/workloads show it)
    T                                     a shipped workload by its name: ExeGPT's tasks, real traces as quantiles
    normal:in=128,81,256;out=128,68,320   mean, std, maximum of either side; lognormal likewise
    uniform:in=16-240;out=16-240          fixed:in=128;out=64
    quantiles:in=p50:100,p99:900;out=p50:40,p99:600;rank_correlation=0.3

The rank correlation (Spearman) may follow every law; without it the sides are independent. A file that has the name of
a shipped workload is reached by its path (`./T`).
"""

import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from exeplan.errors import InputError
from exeplan.files import MAX_BYTES, read_text, read_yaml, shipped, shipped_names
from exeplan.workload.laws import MAX_LENGTH, fixed, joint, normal, quantiles, uniform
from exeplan.workload.length_law import LengthLaw
from exeplan.workload.workload import Trace, Workload

_FIELDS = {
    "normal": ("mean", "std", "max"),
    "lognormal": ("mean", "std", "max"),
    "uniform": ("min", "max"),
    "fixed": ("tokens",),
}
"""The parameters of each law but `quantiles`, in the order of the short form."""
_LAWS = (*_FIELDS, "quantiles")
_SIDES = {"in": "input", "out": "output"}
_LAW_FILE = ("source", "licence", "input", "output", "rank_correlation")


def load_workload(text: str) -> Workload:
    """The workload that `text` means: see the module. Raises InputError naming file and row, or the part of a law."""
    return replace(_load(text), reference=text)


def _load(text: str) -> Workload:
    law = text.partition(":")[0]
    if law in _LAWS and ":" in text:
        return _from_mapping(text, _parse_law(text))
    if text in shipped_names("workloads"):
        return _from_yaml(text, shipped("workloads", text))
    path = Path(text)
    if not os.path.exists(text):  # Unlike Path.exists, False for what cannot be a path.
        names = ", ".join(shipped_names("workloads"))
        raise InputError(f"no workload '{_shown(text)}': no such file, no law ({', '.join(_LAWS)}), none of {names}")
    if path.suffix in (".yaml", ".yml"):
        return _from_yaml(path.stem, path)
    trace = _read_trace(path)
    return Workload.of_trace(path.name, trace, source=f"{path.name}, {len(trace.inputs)} requests")


# --- laws -------------------------------------------------------------------------------------------------------------


def _from_yaml(name: str, path: Path) -> Workload:
    try:
        return _from_mapping(name, read_yaml(path), path.name)
    except InputError as error:
        raise InputError(str(error) if str(path) in str(error) else f"{path}: {error}") from None


def _from_mapping(name: str, body: Mapping[str, Any], source: str = "") -> Workload:
    if unknown := sorted(str(key) for key in body if key not in _LAW_FILE):
        raise InputError(f"unknown field '{unknown[0]}'; a law has {', '.join(_LAW_FILE)}")
    correlation = _number(body.get("rank_correlation", 0), "rank_correlation")
    if not -1 <= correlation <= 1:
        raise InputError(f"rank_correlation must lie between -1 and 1, found {correlation:g}")
    notes = [str(body.get("source", source)).strip()]
    laws = {side: _side(side, body.get(side), notes) for side in ("input", "output")}
    inputs, outputs, weights = joint(laws["input"], laws["output"], correlation)
    source = "; ".join(note for note in notes if note)
    return Workload.of(name, inputs=inputs, outputs=outputs, weights=weights, source=source)


def _side(side: str, body: Any, notes: list[str]) -> LengthLaw:
    """The law of one side; what differs from the words of its author is added to `notes`."""
    if not isinstance(body, Mapping) or len(body) != 1 or next(iter(body)) not in _LAWS:
        raise InputError(f"{side} must be one law ({', '.join(_LAWS)}) with its parameters")
    ((name, parameters),) = body.items()
    try:
        law = _law(name, parameters)
    except InputError as error:
        raise InputError(f"{side}: {error}") from None
    std = float(parameters["std"]) if name in ("normal", "lognormal") else law.std
    if abs(law.std - std) > 0.01 * std:
        notes.append(f"{side} std {std:g} is out of reach, {law.std:.3g} used")
    return law


def _law(name: str, parameters: Any) -> LengthLaw:
    if name == "quantiles":
        return quantiles(_quantile_points(parameters))
    fields = _FIELDS[name]
    if name == "fixed" and not isinstance(parameters, Mapping):
        parameters = {"tokens": parameters}
    if not isinstance(parameters, Mapping) or set(parameters) != set(fields):
        raise InputError(f"{name} takes {', '.join(fields)}; found {_shown(parameters)}")
    if name in ("normal", "lognormal"):
        mean, std = (_number(parameters[field], field) for field in ("mean", "std"))
        return normal(mean, std, _length(parameters["max"], "max"), logarithmic=name == "lognormal")
    lengths = [_length(parameters[field], field) for field in fields]
    return fixed(*lengths) if name == "fixed" else uniform(*lengths)


def _quantile_points(parameters: Any) -> dict[float, float]:
    if not isinstance(parameters, Mapping):
        raise InputError(f"quantiles take points such as p50: 100, found {_shown(parameters)}")
    points: dict[float, float] = {}
    for key, value in parameters.items():
        percent = _number(str(key).removeprefix("p"), f"quantile '{_shown(key)}'")
        if not 0 <= percent <= 100 or percent in points:
            raise InputError(f"quantile '{_shown(key)}' must be one of p0 to p100, each once")
        points[percent] = _length(value, f"p{percent:g}")
    return points


def _parse_law(text: str) -> dict[str, Any]:
    """The short form as the mapping that a law file holds."""
    law, _, rest = text.partition(":")
    body: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in rest.split(";"))):
        key, equals, value = part.partition("=")
        field = _SIDES.get(key.strip(), key.strip())
        if not equals or field not in ("input", "output", "rank_correlation") or field in body:
            raise InputError(f"'{_shown(part)}' is not one of in=, out= and rank_correlation=, each once")
        body[field] = value.strip() if field == "rank_correlation" else {law: _parse_side(law, value)}
    return body


def _parse_side(law: str, value: str) -> dict[str, str]:
    if law != "quantiles":
        fields = _FIELDS[law]
        values = [word.strip() for word in value.split("-" if law == "uniform" else ",")]
        if len(values) != len(fields):
            raise InputError(f"{law} takes {', '.join(fields)}; found '{_shown(value)}'")
        return dict(zip(fields, values, strict=True))
    points: dict[str, str] = {}
    for word in value.split(","):
        percent, colon, tokens = word.partition(":")
        if not colon or percent.strip() in points:
            raise InputError(f"quantiles take points such as p50:100, each once; found '{_shown(word)}'")
        points[percent.strip()] = tokens.strip()
    return points


# --- traces -----------------------------------------------------------------------------------------------------------


def _read_trace(path: Path) -> Trace:
    text = _read_gzip(path) if path.suffix == ".gz" else read_text(path)
    rows = _json_rows(text, path) if text.lstrip()[:1] == "{" else _csv_rows(text, path)
    inputs: list[int] = []
    outputs: list[int] = []
    arrivals: list[float] = []
    for number, (line, row) in enumerate(rows, 1):
        try:
            inputs.append(_length(row[0], "input_tokens"))
            outputs.append(_length(row[1], "output_tokens"))
            if row[2] not in (None, ""):
                arrivals.append(_arrival(row[2], arrivals[-1] if arrivals else 0.0))
            if len(arrivals) not in (0, number):
                raise InputError("arrival_s must be given for every request or for none")
        except InputError as error:
            raise InputError(f"{path} row {number} (line {line}): {error}") from None
    if not inputs:
        raise InputError(f"{path} holds no request; a trace needs at least one row below the header")
    return Trace(np.array(inputs), np.array(outputs), np.array(arrivals) if arrivals else None)


def _read_gzip(path: Path) -> str:
    try:
        with gzip.open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise InputError(f"{path} is larger than {MAX_BYTES >> 20} MiB unpacked")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is not a whole gzip file: {error}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


Row = tuple[Any, Any, Any]


def _csv_rows(text: str, path: Path) -> Iterator[tuple[int, Row]]:
    """Line number and (input, output, arrival) of each row that is not blank."""
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        header = [name.strip() for name in next(reader, [])]
        columns = [header.index(name) for name in ("input_tokens", "output_tokens") if name in header]
        if len(columns) < 2:
            found = _shown(", ".join(header))
            raise InputError(f"{path} needs the columns input_tokens and output_tokens; found {found}")
        arrival = header.index("arrival_s") if "arrival_s" in header else None
        for row in reader:
            if not row:
                continue
            if len(row) < len(header):
                raise InputError(f"{path} line {reader.line_num}: {len(row)} fields, the header has {len(header)}")
            yield reader.line_num, (row[columns[0]], row[columns[1]], None if arrival is None else row[arrival])
    except csv.Error as error:
        raise InputError(f"{path} line {reader.line_num}: {error}") from None


def _json_rows(text: str, path: Path) -> Iterator[tuple[int, Row]]:
    for line, content in enumerate(text.split("\n"), 1):
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except (ValueError, RecursionError):
            raise InputError(f"{path} line {line} is not valid JSON") from None
        if not isinstance(row, dict) or not {"input_tokens", "output_tokens"} <= set(row):
            raise InputError(f"{path} line {line} must be an object with input_tokens and output_tokens")
        yield line, (row["input_tokens"], row["output_tokens"], row.get("arrival_s"))


# --- values -----------------------------------------------------------------------------------------------------------


def _length(value: Any, name: str) -> int:
    if type(value) is str and value.isascii() and value.isdigit() and len(value) < 9:
        length = float(value)
    else:
        length = _number(value, name)
    if not 1 <= length <= MAX_LENGTH or length != int(length):
        raise InputError(f"{name} must be a whole number from 1 to {MAX_LENGTH:,}, found {_shown(value)}")
    return int(length)


def _arrival(value: Any, previous: float) -> float:
    arrival = _number(value, "arrival_s")
    if arrival < 0:
        raise InputError(f"arrival_s must not be negative, found {arrival:g}")
    if arrival < previous:
        raise InputError(f"arrival_s must not fall, found {arrival:g} after {previous:g}")
    return arrival


def _number(value: Any, name: str) -> float:
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else np.nan
    except (ValueError, OverflowError):
        number = np.nan
    if not np.isfinite(number):
        raise InputError(f"{name} must be a number, found {_shown(value)}")
    return number


def _shown(value: Any) -> str:
    """A value for a message: on one line, and short."""
    text = str(value) if isinstance(value, str) else repr(value)
    text = " ".join(text.split()) or "nothing"
    return text if len(text) <= 60 else f"{text[:57]}..."
