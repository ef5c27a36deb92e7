"""Measured serving runs from files: a table of one's own, and what `vllm bench serve` and guidellm write.

    CSV         engine, model, dtype, device (or system), tensor_parallel_size, input_tokens, output_tokens,
                concurrency, and ttft and tpot with their unit in the name: ttft_ms, ttft_s, tpot_ms, tpot_s;
                optionally version, expert_parallel_size and num_requests
    JSON        a result of `vllm bench serve --save-result --max-concurrency N`, or several, one a line, as
                --append-result writes them: mean_ttft_ms, mean_tpot_ms, total_input_tokens, total_output_tokens,
                completed, failed (else num_prompts), max_concurrency, request_rate, model_id; and of --metadata
                KEY=VALUE the columns engine, dtype, device, version, tensor_parallel_size and expert_parallel_size;
                without the engine it is that of the backend, where only one engine has it, as SGLang's bench_serving
                writes it: not of openai and vllm, as which the servers of many engines are asked
    JSON        guidellm's report: benchmarks[] with metrics.time_to_first_token_ms, inter_token_latency_ms,
                prompt_token_count, output_token_count and request_concurrency, of successful requests, each its mean,
                request_totals, config.backend.model, and config.strategy (before 0.4: args.strategy)

What a file does not say is taken from the profile: engine, model, dtype and device; a result in JSON does not say the
tensor parallel size unless its metadata does, which is then the profile's only one or stated by the caller. A model in
JSON whose sizes are not known here may be a name that a server was given: it is taken for the profile's, and a remark
says so. Means of lengths stand for all requests: lengths that vary much make a run less comparable.

Comparable are runs in which a number of clients send their next prompt when they have their answer. Runs at a rate are
not: a result of vllm's at a rate is refused; of a report of guidellm's, whose sweep has both, they are left out, and
a remark says so. So is a run of which more than one request in a hundred failed.
"""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exeplan.core.models.model import load_model_sizes
from exeplan.errors import InputError
from exeplan.files import read_text
from exeplan.profiler.calibration.serving_run import ServingRun

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_METADATA = ("engine", "dtype", "device", "version", "tensor_parallel_size", "expert_parallel_size")
_CLOSED = ("synchronous", "concurrent")
"""guidellm's strategies with a fixed number of clients."""
_BACKENDS = {"sglang": "sglang", "tgi": "tgi", "lmdeploy": "lmdeploy", "trt": "trtllm", "tensorrt": "trtllm"}
"""The engine that a benchmark's client asks, by how its backend's name begins."""
_MOST_FAILED = 0.01
_NUMBERS = ("tensor_parallel_size", "input_tokens", "output_tokens", "concurrency")
_MOST = 2**31
_VLLM = ("mean_ttft_ms", "mean_tpot_ms", "total_input_tokens", "total_output_tokens", "completed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What a file need not say."""

    engine: str
    engine_stated: bool = False
    """For these files, so that a backend says nothing."""
    model: str
    dtype: str
    device: str
    tensor_parallel_size: int | None = None


@dataclass(frozen=True, slots=True)
class FileRuns:
    """Of one file, in its order, with a sentence for each that was left out, and for each model that is not known."""

    runs: tuple[ServingRun, ...]
    remarks: tuple[str, ...] = ()


def read_runs(path: Path, defaults: Defaults) -> FileRuns:
    """All runs of a file that can be compared.

    Raises InputError naming the line, column or field that is missing or wrong, and where no run is left.
    """
    text = read_text(path)
    if text.lstrip()[:1] not in ("{", "["):
        return FileRuns(tuple(_of_csv(text, path, defaults)))
    body = _json(text, path)
    if isinstance(body, dict) and "benchmarks" in body:
        return _of_report(body["benchmarks"], path, defaults)
    results = body if isinstance(body, list) else [body]
    found = []
    for number, one in enumerate(results, 1):
        where = f"{path} run {number}"
        found.append(_run(_of_vllm(one, where), where, defaults))
    return FileRuns(tuple(found), _taken((one.get("model_id") for one in results), path, defaults))


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


def _json(text: str, path: Path) -> Any:
    """A value, or those of several lines."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return [_object(line, number, path) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


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
    if (rate := one.get("request_rate", "inf")) not in ("inf", math.inf, None) or one.get("ramp_up_strategy"):
        raise InputError(
            f"{where} was sent at a rate (request_rate {rate}); comparable are runs without --request-rate, in which "
            "--max-concurrency clients send their next prompt when they have their answer"
        )
    completed = _number(one["completed"], f"{where}: completed", least=1)
    if (failed := _failed(one, completed)) > _MOST_FAILED * completed:
        raise InputError(f"{where}: {failed:g} requests failed, {completed:g} did not; so the load was another")
    return {name: one[name] for name in _METADATA if name in one} | {
        "asked": _engine_of_backend(one.get("backend")),
        "model": _known_model(one.get("model_id")),
        "ttft_ms": one["mean_ttft_ms"],
        "tpot_ms": one["mean_tpot_ms"],
        "input_tokens": round(_number(one["total_input_tokens"], f"{where}: total_input_tokens") / completed),
        "output_tokens": round(_number(one["total_output_tokens"], f"{where}: total_output_tokens") / completed),
        "concurrency": one["max_concurrency"],
        "num_requests": completed,
    }


def _failed(one: Mapping[str, Any], completed: float) -> float:
    """Requests of a result; older versions do not say it, but how many were sent."""
    if (failed := one.get("failed")) is not None:
        return _count(failed)
    return max(0.0, _count(one.get("num_prompts")) - completed)


def _engine_of_backend(backend: Any) -> str:
    """'' where several engines have it, or it is not known."""
    return next((engine for name, engine in _BACKENDS.items() if str(backend).lower().startswith(name)), "")


def _known_model(name: Any) -> str:
    """A name whose sizes are known here; none for a name that a server was given, which says nothing."""
    try:
        return load_model_sizes(str(name)).name if name else ""
    except InputError:
        return ""


def _taken(models: Iterable[Any], path: Path, defaults: Defaults) -> tuple[str, ...]:
    """A sentence for each of these names that the profile's model is taken for."""
    unknown = dict.fromkeys(str(name) for name in models if name and not _known_model(name))
    return tuple(
        f"{path}: model '{name}' is not known here, and is taken for {defaults.model}"
        for name in unknown
        if name != defaults.model
    )


def _of_report(benchmarks: Any, path: Path, defaults: Defaults) -> FileRuns:
    if not isinstance(benchmarks, list) or not benchmarks:
        raise InputError(f"{path} has no list of benchmarks; write guidellm's report as JSON")
    runs, remarks, models = [], [], []
    for number, one in enumerate(benchmarks, 1):
        where = f"{path} benchmark {number}"
        strategy = _strategy(one)
        if (kind := strategy.get("type_", "concurrent")) in _CLOSED:
            runs.append(_run(_of_guidellm(one, strategy, where), where, defaults))
            models.append(_at(one, "config", "backend", "model"))
        else:
            remarks.append(f"{where} left out: '{kind}' sends at a rate, not when a client has its answer")
    if not runs:
        raise InputError(
            f"{path} has no run with a number of clients ({', '.join(_CLOSED)}), only {len(remarks)} at a rate; run "
            "guidellm with --profile concurrent"
        )
    return FileRuns(tuple(runs), (*remarks, *_taken(models, path, defaults)))


def _strategy(one: Any) -> Mapping[str, Any]:
    """How requests were sent; nothing where the report does not say it."""
    for part in ("config", "args"):
        if isinstance(found := _at(one, part, "strategy"), Mapping):
            return found
    return {}


def _at(value: Any, *keys: str) -> Any:
    """What lies under these keys; None where one of them is not there."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _of_guidellm(one: Any, strategy: Mapping[str, Any], where: str) -> dict[str, Any]:
    def mean(name: str) -> Any:
        if (value := _at(one, "metrics", name, "successful", "mean")) is None:
            raise InputError(f"{where} has no metrics.{name}.successful.mean; write guidellm's report as JSON")
        return value

    totals = one["metrics"].get("request_totals") if isinstance(one["metrics"], Mapping) else None
    totals = totals if isinstance(totals, Mapping) else {}
    done, failed = _count(totals.get("successful")), _count(totals.get("errored"))
    if failed > _MOST_FAILED * done:
        raise InputError(f"{where}: {failed:g} requests failed, {done:g} did not; so the load was another")
    clients = 1 if strategy.get("type_") == "synchronous" else strategy.get("streams")
    seen = max(1, round(_number(mean("request_concurrency"), f"{where}: request_concurrency")))
    return {
        "model": _known_model(_at(one, "config", "backend", "model")),
        "ttft_ms": mean("time_to_first_token_ms"),
        "tpot_ms": mean("inter_token_latency_ms"),
        "input_tokens": round(_number(mean("prompt_token_count"), f"{where}: prompt_token_count")),
        "output_tokens": round(_number(mean("output_token_count"), f"{where}: output_token_count")),
        "concurrency": clients if isinstance(clients, int) else seen,
        "num_requests": done or None,
    }


def _run(cells: Mapping[str, Any], where: str, defaults: Defaults) -> ServingRun:
    size = cells.get("tensor_parallel_size") or defaults.tensor_parallel_size
    if size is None:
        raise InputError(f"{where} does not say its tensor_parallel_size; give --tensor-parallel-size")
    asked = "" if defaults.engine_stated else cells.get("asked")
    return ServingRun(
        engine=str(cells.get("engine") or asked or defaults.engine),
        version=str(cells.get("version") or ""),
        model=str(cells.get("model") or defaults.model),
        dtype=str(cells.get("dtype") or defaults.dtype),
        device=str(cells.get("device") or defaults.device),
        input_tokens=_whole(cells.get("input_tokens"), f"{where}: input_tokens"),
        output_tokens=_outputs(cells.get("output_tokens"), f"{where}: output_tokens"),
        concurrency=_whole(cells.get("concurrency"), f"{where}: concurrency"),
        tensor_parallel_size=_whole(size, f"{where}: tensor_parallel_size"),
        expert_parallel_size=_whole(cells.get("expert_parallel_size") or 1, f"{where}: expert_parallel_size"),
        num_requests=_whole(count, f"{where}: num_requests") if (count := cells.get("num_requests")) else None,
        ttft=_seconds(cells, "ttft", where),
        tpot=_seconds(cells, "tpot", where),
        where=where,
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


def _outputs(value: Any, where: str) -> int:
    if (number := _whole(value, where)) < 2:
        raise InputError(f"{where} must be at least 2, found {value!r}: a run of one output token has no tpot")
    return number


def _count(value: Any) -> float:
    """A number of requests that a file may give; 0 for nothing."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def _number(value: Any, where: str, least: float = 0.0) -> float:
    try:
        number = math.nan if isinstance(value, bool) or value is None else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (least <= number < _MOST and number > 0):
        raise InputError(f"{where} must be a number above 0{f', at least {least:g}' if least else ''}, found {value!r}")
    return number
