"""Measured serving runs from files: a table of one's own, and what `vllm bench serve` and guidellm write.

    CSV         engine, model, dtype, device (or system), tensor_parallel_size, input_tokens, output_tokens,
                concurrency, and ttft and tpot with their unit in the name: ttft_ms, ttft_s, tpot_ms, tpot_s;
                optionally version
    JSON        a result of `vllm bench serve --save-result --max-concurrency N`: mean_ttft_ms, mean_tpot_ms,
                total_input_tokens, total_output_tokens, completed, max_concurrency
    JSON        guidellm's report: benchmarks[] with metrics.time_to_first_token_ms, inter_token_latency_ms,
                prompt_token_count, output_token_count and request_concurrency, of successful requests, each its mean

What a file does not say is taken from the profile: engine, model, dtype and device; a result in JSON does not say the
tensor parallel size, which is then the profile's only one or stated by the caller. Means of lengths stand for all
requests: lengths that vary much make a run less comparable.
"""

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exeplan.errors import InputError
from exeplan.files import read_text
from exeplan.profiler.calibration.serving_run import ServingRun

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_NUMBERS = ("tensor_parallel_size", "input_tokens", "output_tokens", "concurrency")
_MOST = 2**31
_VLLM = ("mean_ttft_ms", "mean_tpot_ms", "total_input_tokens", "total_output_tokens", "completed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What a file need not say."""

    engine: str
    model: str
    dtype: str
    device: str
    tensor_parallel_size: int | None = None


def read_runs(path: Path, defaults: Defaults) -> list[ServingRun]:
    """All runs of a file, in its order. Raises InputError naming the line, column or field that is missing or wrong."""
    text = read_text(path)
    if text.lstrip()[:1] in ("{", "["):
        return list(_of_json(text, path, defaults))
    return list(_of_csv(text, path, defaults))


def _of_csv(text: str, path: Path, defaults: Defaults) -> Iterator[ServingRun]:
    lines = csv.DictReader(text.splitlines())
    columns = {name.strip() for name in lines.fieldnames or ()}
    for name in (*_NUMBERS[1:], "ttft", "tpot"):
        found = {name} if name in _NUMBERS else {f"{name}_{unit}" for unit in _UNITS}
        if not columns & found:
            raise InputError(f"{path} has no column {' or '.join(sorted(found))}; it has {', '.join(sorted(columns))}")
    for number, line in enumerate(lines, 2):
        cells = {name.strip(): (value or "").strip() for name, value in line.items() if name}
        cells["device"] = cells.get("device") or cells.get("system") or ""
        yield _run(cells, f"{path} line {number}", defaults)


def _of_json(text: str, path: Path, defaults: Defaults) -> Iterator[ServingRun]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = [_object(line, number, path) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if isinstance(body, dict) and isinstance(body.get("benchmarks"), list):
        for number, one in enumerate(body["benchmarks"], 1):
            yield _run(_of_guidellm(one, f"{path} benchmark {number}"), f"{path} benchmark {number}", defaults)
        return
    for number, one in enumerate(body if isinstance(body, list) else [body], 1):
        yield _run(_of_vllm(one, f"{path} run {number}"), f"{path} run {number}", defaults)


def _object(line: str, number: int, path: Path) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise InputError(f"{path} line {number} is not valid JSON") from None


def _of_vllm(one: Any, where: str) -> dict[str, Any]:
    if not isinstance(one, Mapping) or (missing := [name for name in _VLLM if name not in one]):
        lacks = f", lacks {', '.join(missing)}" if isinstance(one, Mapping) else ""
        raise InputError(f"{where} is no result of `vllm bench serve --save-result` or guidellm{lacks}")
    if not one.get("max_concurrency"):
        raise InputError(
            f"{where} was not run with --max-concurrency, without which the number of clients is not known"
        )
    completed = _number(one["completed"], f"{where}: completed", least=1)
    return {
        "ttft_ms": one["mean_ttft_ms"],
        "tpot_ms": one["mean_tpot_ms"],
        "input_tokens": round(_number(one["total_input_tokens"], f"{where}: total_input_tokens") / completed),
        "output_tokens": round(_number(one["total_output_tokens"], f"{where}: total_output_tokens") / completed),
        "concurrency": one["max_concurrency"],
    }


def _of_guidellm(one: Any, where: str) -> dict[str, Any]:
    def mean(name: str) -> Any:
        value = one
        for key in ("metrics", name, "successful", "mean"):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is None:
            raise InputError(f"{where} has no metrics.{name}.successful.mean; write guidellm's report as JSON")
        return value

    return {
        "ttft_ms": mean("time_to_first_token_ms"),
        "tpot_ms": mean("inter_token_latency_ms"),
        "input_tokens": round(_number(mean("prompt_token_count"), f"{where}: prompt_token_count")),
        "output_tokens": round(_number(mean("output_token_count"), f"{where}: output_token_count")),
        "concurrency": max(1, round(_number(mean("request_concurrency"), f"{where}: request_concurrency"))),
    }


def _run(cells: Mapping[str, Any], where: str, defaults: Defaults) -> ServingRun:
    size = cells.get("tensor_parallel_size") or defaults.tensor_parallel_size
    if size is None:
        raise InputError(f"{where} does not say its tensor_parallel_size; give --tensor-parallel-size")
    return ServingRun(
        engine=str(cells.get("engine") or defaults.engine),
        version=str(cells.get("version") or ""),
        model=str(cells.get("model") or defaults.model),
        dtype=str(cells.get("dtype") or defaults.dtype),
        device=str(cells.get("device") or defaults.device),
        input_tokens=_whole(cells.get("input_tokens"), f"{where}: input_tokens"),
        output_tokens=_whole(cells.get("output_tokens"), f"{where}: output_tokens"),
        concurrency=_whole(cells.get("concurrency"), f"{where}: concurrency"),
        tensor_parallel_size=_whole(size, f"{where}: tensor_parallel_size"),
        ttft=_seconds(cells, "ttft", where),
        tpot=_seconds(cells, "tpot", where),
    )


def _seconds(cells: Mapping[str, Any], name: str, where: str) -> float:
    for unit, scale in _UNITS.items():
        if cells.get(f"{name}_{unit}") not in (None, ""):
            return scale * _number(cells[f"{name}_{unit}"], f"{where}: {name}_{unit}")
    raise InputError(f"{where} has no {name} in {', '.join(f'{name}_{unit}' for unit in _UNITS)}")


def _whole(value: Any, where: str) -> int:
    number = _number(value, where, least=1)
    if number != int(number):
        raise InputError(f"{where} must be a whole number, found {value!r}")
    return int(number)


def _number(value: Any, where: str, least: float = 0.0) -> float:
    try:
        number = math.nan if isinstance(value, bool) or value is None else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (least <= number < _MOST and number > 0):
        raise InputError(f"{where} must be a number above 0{f', at least {least:g}' if least else ''}, found {value!r}")
    return number
