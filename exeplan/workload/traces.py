"""Traces: the lengths of requests, and when they came, in the formats in which people hold them; told by their content.

    exeplan             CSV or JSON lines: input_tokens, output_tokens, optionally arrival_s (seconds, never falling)
    Azure LLM           CSV: TIMESTAMP, ContextTokens, GeneratedTokens (AzurePublicDataset, 2023 to 2025)
    BurstGPT            CSV: Timestamp (seconds), Request tokens, Response tokens
    Mooncake            JSON lines: timestamp (whole milliseconds), input_length, output_length
    Qwen-Bailian        JSON lines: the same names with chat_id and turn; timestamp in seconds
    vllm bench serve    JSON: input_lens, output_lens, start_times (--save-result --save-detailed); SGLang's
                        --output-details likewise, an object a line
    guidellm            JSON: benchmarks[].requests.successful[], with prompt_tokens, output_tokens, request_start_time
    ShareGPT            JSON array or lines: conversations[] of {from, value}, or messages[] of {role, content}; the
                        first two turns, as vLLM's and SGLang's benchmarks take them; a system turn is of the prompt

Any may be gzipped. Of a foreign trace, requests without input or output are left out, times are put in order and start
with its first request; `ReadTrace.remarks` says so. Text is counted by a tokenizer where one is given
(`exeplan convert`), and otherwise estimated. Not here: laws (`files.py`).
"""

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from exeplan.errors import InputError
from exeplan.files import read_text
from exeplan.workload.laws import MAX_LENGTH
from exeplan.workload.workload import Trace

CountTokens = Callable[[str], int]
_OTHERS = "traces of Azure, BurstGPT, Mooncake, Qwen-Bailian, ShareGPT, vllm bench serve and guidellm are read too"
_BETWEEN = re.compile(r"[\s,]*")
MAX_TRACE_BYTES = 1 << 30
"""Of a trace, unpacked: ShareGPT's file has two thirds of it."""
_BYTES_A_TOKEN = 4
"""Of English text, about."""


@dataclass(frozen=True, slots=True)
class ReadTrace:
    """A trace, and what was done to read it, for people."""

    trace: Trace
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Row:
    """A request as it stands in the file; `line` is where, and None in a file that is one JSON value."""

    line: int | None
    inputs: Any
    outputs: Any
    arrival: Any


@dataclass(frozen=True, slots=True)
class _Found:
    """The requests of a file in one of the formats."""

    rows: Iterable[_Row]
    format: str = ""
    """Of another program, and "" for our own, which is taken as it is or refused."""
    seconds: Callable[[Any], float] | None = None
    """From its times to seconds; None for those that are seconds."""
    remarks: tuple[str, ...] = ()


def read_trace(path: Path, count_tokens: CountTokens | None = None) -> ReadTrace:
    """The requests of a file. Raises InputError naming the row that is wrong, or what was expected."""
    text = _read_gzip(path) if path.suffix == ".gz" else read_text(path, MAX_TRACE_BYTES)
    start = text.lstrip()[:1]
    found = _json(text, path, count_tokens) if start == "{" or _is_array(text) else _csv(text, path)
    return _imported(found, path) if found.format else ReadTrace(_own(found.rows, path))


def _own(rows: Iterable[_Row], path: Path) -> Trace:
    inputs: list[int] = []
    outputs: list[int] = []
    arrivals: list[float] = []
    for number, row in enumerate(rows, 1):
        try:
            inputs.append(whole_length(row.inputs, "input_tokens"))
            outputs.append(whole_length(row.outputs, "output_tokens"))
            if row.arrival not in (None, ""):
                arrivals.append(_arrival(row.arrival, arrivals[-1] if arrivals else 0.0))
            if len(arrivals) not in (0, number):
                raise InputError("arrival_s must be given for every request or for none")
        except InputError as error:
            raise InputError(f"{path} row {number} (line {row.line}): {error}") from None
    if not inputs:
        raise InputError(f"{path} holds no request; a trace needs at least one row below the header")
    return Trace(np.array(inputs), np.array(outputs), np.array(arrivals) if arrivals else None)


def _imported(found: _Found, path: Path) -> ReadTrace:
    """A foreign trace in the order of its times, without what is no request here."""
    kept: list[tuple[int, int, float]] = []
    empty, timed = 0, 0
    for number, row in enumerate(found.rows, 1):
        try:
            lengths = [_count(row.inputs, "the input"), _count(row.outputs, "the output")]
            if 0 in lengths:
                empty += 1
                continue
            has_time = row.arrival not in (None, "")
            arrival = (found.seconds or _seconds)(row.arrival) if has_time else 0.0
        except InputError as error:
            where = "" if row.line is None else f" (line {row.line})"
            raise InputError(f"{path}, read as a trace of {found.format}, request {number}{where}: {error}") from None
        timed += has_time
        kept.append((lengths[0], lengths[1], arrival))
    if not kept:
        raise InputError(f"{path}, read as a trace of {found.format}, holds no request with an input and an output")
    return _in_order(kept, found, empty=empty, timed=timed)


def _in_order(kept: list[tuple[int, int, float]], found: _Found, *, empty: int, timed: int) -> ReadTrace:
    inputs, outputs, arrivals = (np.array(column) for column in zip(*kept, strict=True))
    remarks = [f"a trace of {found.format}", *found.remarks]
    if empty:
        remarks.append(f"{empty} without input or output left out")
    if timed < len(kept):
        if timed:
            remarks.append(f"times left out, as {len(kept) - timed} of {len(kept)} requests have none")
        return ReadTrace(Trace(inputs, outputs), tuple(remarks))
    order = np.argsort(arrivals, kind="stable")
    arrivals = arrivals[order] - arrivals[order[0]]
    return ReadTrace(Trace(inputs[order], outputs[order], arrivals), tuple(remarks))


# --- CSV --------------------------------------------------------------------------------------------------------------

_OWN = ("input_tokens", "output_tokens", "arrival_s")


def _csv(text: str, path: Path) -> _Found:
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        header = [name.strip() for name in next(reader, [])]
    except csv.Error as error:
        raise InputError(f"{path} line {reader.line_num}: {error}") from None
    formats = (
        (_OWN, "", None),
        (("ContextTokens", "GeneratedTokens", "TIMESTAMP"), "Azure", _date),
        (("Request tokens", "Response tokens", "Timestamp"), "BurstGPT", None),
    )
    for columns, name, seconds in formats:
        if set(columns[:2]) <= set(header):
            places = [header.index(column) if column in header else None for column in columns]
            return _Found(_csv_rows(reader, path, len(header), places), name, seconds)
    for separator, called in ((";", "semicolons"), ("\t", "tabs")):
        if len(header) == 1 and separator in header[0]:
            raise InputError(f"{path} has columns between {called}; write commas between them, and points in numbers")
    raise InputError(
        f"{path} needs the columns input_tokens and output_tokens; found {shown(', '.join(header))}; {_OTHERS}"
    )


def _csv_rows(reader: Any, path: Path, width: int, places: list[int | None]) -> Iterator[_Row]:
    """A row for each that is not blank."""
    try:
        for row in reader:
            if not any(field.strip() for field in row):
                continue
            if len(row) < width or any(field.strip() for field in row[width:]):
                raise InputError(f"{path} line {reader.line_num}: {len(row)} fields, the header has {width}")
            yield _Row(reader.line_num, *(None if place is None else row[place] for place in places))
    except csv.Error as error:
        raise InputError(f"{path} line {reader.line_num}: {error}") from None


def _date(value: str) -> float:
    """Azure's dates have tenths of microseconds, and some a time zone."""
    try:
        found = datetime.fromisoformat(value.strip())
    except ValueError:
        raise InputError(f"TIMESTAMP must be a date such as 2023-11-16 18:17:03.97, found {shown(value)}") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


# --- JSON -------------------------------------------------------------------------------------------------------------


def _is_array(text: str) -> bool:
    """Of objects: a CSV field may begin with a bracket too."""
    start = text.lstrip()
    return start[:1] == "[" and start[1:].lstrip()[:1] in ("{", "]")


def _json(text: str, path: Path, count_tokens: CountTokens | None) -> _Found:
    """One value, or an object a line; the first one tells the format."""
    whole = None if _is_array(text) else _whole(text)
    if isinstance(whole, dict) and isinstance(whole.get("benchmarks"), list):
        return _guidellm(whole["benchmarks"], path)
    rest = _elements(text, path) if _is_array(text) else _lines(text, path) if whole is None else iter([(1, whole)])
    start = list(islice(rest, 1))
    values = chain(start, rest)
    keys = set(start[0][1]) if start and isinstance(start[0][1], dict) else set()
    if "input_lens" in keys or ("ttfts" in keys and "output_lens" in keys) or "total_input_tokens" in keys:
        return _bench([value for _, value in values], path)
    if {"input_length", "output_length"} <= keys:
        fields = ("input_length", "output_length", "timestamp")
        if {"chat_id", "turn"} <= keys:
            return _Found(_object_rows(values, path, fields), "Qwen-Bailian")
        return _Found(_object_rows(values, path, fields), "Mooncake", _whole_milliseconds)
    if keys & {"conversations", "conversation", "messages"}:
        remark = "" if count_tokens else f"tokens estimated as bytes of text / {_BYTES_A_TOKEN}, no tokenizer was given"
        rows = _turn_rows(values, path, count_tokens or _estimated)
        return _Found(rows, "ShareGPT", remarks=tuple(filter(None, (remark,))))
    return _Found(_object_rows(values, path, _OWN))


def _whole(text: str) -> Any:
    """The JSON value that the text is; None where it is not one, such as lines of them."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _elements(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    """The elements of a JSON array one by one, as it may be large, and the line where each begins."""
    decoder, place, line, counted = json.JSONDecoder(), text.index("[") + 1, 1, 0
    while (match := _BETWEEN.match(text, place)) and text[match.end() : match.end() + 1] not in ("]", ""):
        line, counted = line + text.count("\n", counted, match.end()), match.end()
        try:
            value, place = decoder.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            raise InputError(f"{path} line {line} is not valid JSON") from None
        yield line, value
    if match is None or text[match.end() :].strip(" \t\r\n") != "]":
        raise InputError(f"{path} must end with the ] of its array; it was cut off, or holds more than one array")


def _lines(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    for line, content in enumerate(text.split("\n"), 1):
        if not content.strip():
            continue
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            raise InputError(f"{path} line {line} is not valid JSON") from None
        yield line, value


def _object_rows(values: Iterable[tuple[int, Any]], path: Path, fields: tuple[str, ...]) -> Iterator[_Row]:
    for line, value in values:
        if not isinstance(value, dict) or not set(fields[:2]) <= set(value):
            raise InputError(f"{path} line {line} must be an object with {fields[0]} and {fields[1]}; {_OTHERS}")
        yield _Row(line, *(value.get(field) for field in fields))


def _bench(runs: Sequence[Any], path: Path) -> _Found:
    """The requests of one run, or of several, whose clocks differ so that their times are left out."""
    timed = any(isinstance(run, dict) and run.get("start_times") for run in runs)
    remark = f"{len(runs)} runs together{', without their times' if timed else ''}"
    return _Found(_bench_rows(runs, path), "vllm bench serve", remarks=(remark,) if len(runs) > 1 else ())


def _bench_rows(runs: Sequence[Any], path: Path) -> Iterator[_Row]:
    for run in runs:
        columns: list[Any] = [run.get(name) for name in ("input_lens", "output_lens")] if isinstance(run, dict) else []
        if not columns or not all(isinstance(column, list) for column in columns):
            raise InputError(f"{path} holds no lengths of single requests; run `vllm bench serve` with --save-detailed")
        if len(columns[0]) != len(columns[1]):
            raise InputError(f"{path} has {len(columns[0])} input_lens and {len(columns[1])} output_lens")
        starts = run.get("start_times")
        timed = len(runs) == 1 and isinstance(starts, list) and len(starts) == len(columns[0])
        times = starts if timed else [None] * len(columns[0])
        for inputs, outputs, time in zip(*columns, times, strict=True):
            yield _Row(None, inputs, outputs, time)


def _guidellm(benchmarks: list[Any], path: Path) -> _Found:
    """All benchmarks of a report together; their times only where there is one."""
    requests: list[Mapping[str, Any]] = []
    for benchmark in benchmarks:
        by_status = benchmark.get("requests") if isinstance(benchmark, dict) else None
        found = by_status.get("successful") if isinstance(by_status, dict) else None
        if not isinstance(found, list) or not all(isinstance(request, dict) for request in found):
            raise InputError(f"{path} has benchmarks without requests.successful; write guidellm's report as JSON")
        requests += found
    timed, remark = len(benchmarks) == 1, f"{len(benchmarks)} benchmarks together, without their times"
    rows = (
        _Row(
            None,
            request.get("prompt_tokens"),
            request.get("output_tokens"),
            request.get("request_start_time", request.get("start_time")) if timed else None,
        )
        for request in requests
    )
    return _Found(rows, "guidellm", remarks=() if timed else (remark,))


def _turn_rows(values: Iterable[tuple[int, Any]], path: Path, count: CountTokens) -> Iterator[_Row]:
    for line, value in values:
        turns = None
        if isinstance(value, dict):
            turns = value.get("conversations") or value.get("conversation") or value.get("messages") or []
        if not isinstance(turns, list):
            raise InputError(f"{path} line {line} must be an object with a list of conversations or messages")
        texts = _first_exchange(turns)
        inputs, outputs = (count(text) if text else 0 for text in (*texts, "", "")[:2])
        yield _Row(line, inputs, outputs, None)


def _first_exchange(turns: Sequence[Any]) -> list[str]:
    """The texts of the first two turns; what a system turn says before them is a part of the prompt."""
    texts = [_text(turn) for turn in turns[:3]]
    first = turns[0] if turns and isinstance(turns[0], dict) else {}
    if len(texts) > 1 and "system" in (first.get("from"), first.get("role")):
        return [texts[0] + texts[1], *texts[2:]]
    return texts[:2]


def _text(turn: Any) -> str:
    """What was said; of messages with parts, their texts."""
    if not isinstance(turn, dict):
        return ""
    said = turn.get("value", turn.get("content"))
    if isinstance(said, list):
        return "".join(part.get("text") or "" for part in said if isinstance(part, dict) and _is_text(part.get("text")))
    return said if isinstance(said, str) else ""


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _estimated(text: str) -> int:
    return max(1, round(len(text.encode("utf-8", "surrogatepass")) / _BYTES_A_TOKEN))


# --- values -----------------------------------------------------------------------------------------------------------


def _read_gzip(path: Path) -> str:
    try:
        with gzip.open(path, "rb") as file:
            data = file.read(MAX_TRACE_BYTES + 1)
        if len(data) > MAX_TRACE_BYTES:
            raise InputError(f"{path} is larger than {MAX_TRACE_BYTES >> 20} MiB unpacked")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is not a whole gzip file: {error}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def whole_length(value: Any, name: str) -> int:
    """A number of tokens, of text as in a CSV too. Raises InputError unless it is whole, at least 1 and believable."""
    if type(value) is str and value.isascii() and value.isdigit() and len(value) < 9:
        length = float(value)
    else:
        length = number(value, name)
    if not 1 <= length <= MAX_LENGTH or length != int(length):
        raise InputError(f"{name} must be a whole number from 1 to {MAX_LENGTH:,}, found {shown(value)}")
    return int(length)


def _count(value: Any, name: str) -> int:
    """The same, or 0: none, as of a request that failed."""
    return 0 if value in (None, "", 0, "0") and value is not False else whole_length(value, name)


def _arrival(value: Any, previous: float) -> float:
    arrival = number(value, "arrival_s")
    if arrival < 0:
        raise InputError(f"arrival_s must not be negative, found {arrival:g}")
    if arrival < previous:
        raise InputError(f"arrival_s must not fall, found {arrival:g} after {previous:g}")
    return arrival


def _seconds(value: Any) -> float:
    return number(value, "its time")


def _whole_milliseconds(value: Any) -> float:
    """Seconds. Times of a fraction are refused: in other traces with these names they are seconds."""
    if (found := _seconds(value)) != int(found):
        raise InputError(f"its time must be whole milliseconds, found {shown(value)}; write seconds as arrival_s")
    return found / 1e3


def number(value: Any, name: str) -> float:
    """A finite number. Raises InputError for anything else."""
    try:
        found = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else np.nan
    except (ValueError, OverflowError):
        found = np.nan
    if not np.isfinite(found):
        raise InputError(f"{name} must be a number, found {shown(value)}")
    return found


def shown(value: Any) -> str:
    """A value for a message: on one line, and short."""
    text = str(value) if isinstance(value, str) else repr(value)
    text = " ".join(text.split()) or "nothing"
    return text if len(text) <= 60 else f"{text[:57]}..."
