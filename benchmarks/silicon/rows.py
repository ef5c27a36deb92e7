"""Serving runs that others measured, and what a planner's picks among them are worth. Seconds and tokens.

A run: `concurrency` clients send prompts of one length, all answers have one length; each client sends its next request
when it has its answer. TTFT is measured from the sending, so that waiting counts; both means are over all requests.

TensorRT-LLM's runs of DeepSeek-R1 on H200s are of two search spaces of InferenceMAX (SemiAnalysisAI/InferenceX at
1cb92d2, Apache-2.0: dsr1-fp8-h200-trt and dsr1-fp8-h200-trt-mtp), whose loads tell them apart. The runs with
`moe_ep_size` 8 have the loads of the latter, which decodes speculatively, how well is not said: left out. Those with 1
have the loads of the former, state no version, and are older than that column: its scripts have always divided whole
experts among the 8 GPUs, and at 8192/1024 with 64 clients the requests too. They are placed so.
"""

import csv
import gzip
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from exeplan.core.schedule import Sharding
from exeplan.files import shipped_names
from exeplan.planner.margins.risk import error_law
from exeplan.profiler.calibration.serving_run import Prediction, ServingRun

_TIGHT = 1.0001
_GRID = 12
"""Bounds of a group between its fastest and its slowest run."""
_MARGINS = np.arange(0.0, 0.401, 0.001)
_LEAST_CANDIDATES = 3
_DTYPES = {"": "bfloat16", "bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "bfloat16"}
_DTYPES |= {"fp8": "fp8", "fp8_block": "fp8"}

DEVICES = {"h100_sxm": "h100-80gb", "h200_sxm": "h200-141gb", "a100_sxm": "a100-80gb"}
_RANDOM = {(1024, 1024), (1024, 8192), (8192, 1024)}
"""Prompt and answer of the runs whose lengths are drawn, from 80 % of these on, so that requests do not end together:
the three shapes of SemiAnalysis' InferenceMAX (--random-range-ratio 0.8), whose runs are named by their date."""
_R1_GPUS = 8
_SHAPES = {"deepseek-r1": "deepseek-v3"}
"""Models that have the sizes of a shipped one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(ServingRun):
    """One measured configuration; `model` is a shipped name, `system` the folder of the operator tables.

    Where ranks attend for requests of their own, `tensor_parallel_size` is that of one.
    """

    system: str
    device: str = ""
    data_parallel_size: int = 1

    @property
    def sharding(self) -> Sharding:
        return Sharding(self.tensor_parallel_size, self.data_parallel_size, self.expert_parallel_size)

    @property
    def half(self) -> int:
        """Which half of the rows it is in, by its configuration."""
        name = f"{self.engine}{self.model}{self.input_tokens}/{self.output_tokens}/{self.concurrency}"
        return zlib.crc32(f"{name}/{self.tensor_parallel_size}".encode()) & 1

    @property
    def deployment(self) -> tuple[str, str, str, str]:
        return self.engine, self.version, self.model, self.dtype

    def rate(self, e2e: float) -> float:
        """Output tokens a second and GPU if a request takes `e2e` seconds."""
        return self.concurrency * self.output_tokens / e2e / self.sharding.num_devices


def read_rows(path: Path, *, with_ranks: bool = False) -> tuple[list[Row], int]:
    """All rows that exeplan has a model and a dtype for, on one stage that does everything, and how many others there
    are; those with attention data parallelism only `with_ranks`."""
    with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as lines:
        found = list(csv.DictReader(lines))
    rows = [_row(model, line) for line in found if (model := _model(line["model_path"])) and _is_plain(line)]
    rows = [row for row in rows if with_ranks or row.data_parallel_size == 1]
    return rows, len(found) - len(rows)


def _is_plain(line: dict[str, str]) -> bool:
    alike = float(line["pp_size"] or 0) == 1
    known = line["mode"] == "agg" and line["system"] in DEVICES and alike and line["precision"] in _DTYPES
    return known and not (_is_r1_on_trtllm(line) and _degree(line, "moe_ep_size") > 1)


def _is_r1_on_trtllm(line: dict[str, str]) -> bool:
    """Whose columns do not say what its runs were."""
    return (line["backend"], line["system"], line["model_path"].split("/")[-1]) == ("trtllm", "h200_sxm", "DeepSeek-R1")


def _sharding(line: dict[str, str]) -> Sharding:
    if _is_r1_on_trtllm(line):
        ranks = line["isl"] == "8192" and _degree(line, "batch_size") == _R1_GPUS * 8
        return Sharding(1 if ranks else _R1_GPUS, _R1_GPUS if ranks else 1, _R1_GPUS)
    return Sharding(*(_degree(line, name) for name in ("tp_size", "attention_dp_size", "moe_ep_size")))


def _degree(line: dict[str, str], name: str) -> int:
    return int(float(line.get(name) or 1))


def _model(path: str) -> str | None:
    """The longest shipped name that the model's begins with."""
    name = path.split("/")[-1].lower()
    name = _SHAPES.get(name, name)
    return max((shipped for shipped in shipped_names("models") if name.startswith(shipped)), key=len, default=None)


def _row(model: str, line: dict[str, str]) -> Row:
    lengths, sharding = (int(float(line["isl"])), int(float(line["osl"]))), _sharding(line)
    return Row(
        engine=line["backend"],
        version=line["backend_version"],
        model=model,
        dtype=_DTYPES[line["precision"]],
        system=line["system"],
        device=DEVICES[line["system"]],
        input_tokens=lengths[0],
        output_tokens=lengths[1],
        least_share=0.8 if lengths in _RANDOM and line.get("id", "")[:2] == "20" else 1.0,
        # Of one rank, the file says.
        concurrency=int(float(line["batch_size"])) * _degree(line, "attention_dp_size"),
        data_parallel_size=sharding.data_parallel_size,
        expert_parallel_size=sharding.expert_parallel_size,
        tensor_parallel_size=sharding.tensor_parallel_size,
        ttft=float(line["silicon_ttft_ms"]) / 1e3,
        tpot=float(line["silicon_tpot_ms"]) / 1e3,
    )


Pair = tuple[Row, Prediction]
Margin = Callable[[Row], float]


def errors(pairs: Sequence[Pair]) -> dict[str, tuple[float, float, float]]:
    """Mean and median of the size, and mean with the sign, of predicted over measured - 1."""
    ratios = {
        "ttft": [p.ttft / r.ttft for r, p in pairs],
        "tpot": [p.tpot / r.tpot for r, p in pairs],
        "e2e": [p.e2e(r) / r.e2e for r, p in pairs],
    }
    found = {}
    for name, values in ratios.items():
        error = np.array(values) - 1
        found[name] = float(np.abs(error).mean()), float(np.median(np.abs(error))), float(error.mean())
    return found


@dataclass(frozen=True, slots=True)
class Picks:
    """Of all cases: the share whose pick breaks the bound when measured, or where nothing is promised although
    something would do; and the measured rate of picks that hold over the best measured one, its mean and median."""

    cases: int
    broken: float
    refused: float
    kept: float
    median_kept: float


def picks(pairs: Sequence[Pair], margin: Margin, bounds: Callable[[Sequence[Row]], Sequence[float]]) -> Picks:
    """For each deployment, prompt and answer length and each bound on e2e: the configuration of the highest predicted
    rate whose predicted e2e times (1 + margin) keeps the bound."""
    cases = broken = refused = 0
    kept = []
    for group in _groups(pairs):
        promised = np.array([p.e2e(r) * (1 + margin(r)) for r, p in group])
        predicted = np.array([r.rate(p.e2e(r)) for r, p in group])
        measured, rate = (np.array([f(r) for r, _ in group]) for f in (lambda r: r.e2e, lambda r: r.rate(r.e2e)))
        for bound in bounds([r for r, _ in group]):
            cases += 1
            fits = promised <= bound
            if not fits.any():
                refused += 1
                continue
            pick = int(np.argmax(np.where(fits, predicted, -np.inf)))
            if measured[pick] > bound:
                broken += 1
            else:
                kept.append(rate[pick] / rate[measured <= bound].max())
    of_kept = (float(np.mean(kept)), float(np.median(kept))) if kept else (0.0, 0.0)
    return Picks(cases, broken / max(cases, 1), refused / max(cases, 1), *of_kept)


def tight_bounds(rows: Sequence[Row]) -> list[float]:
    """Each measured e2e: some configuration, often the best, lies on the bound."""
    return [row.e2e * _TIGHT for row in rows]


def spread_bounds(rows: Sequence[Row]) -> list[float]:
    """From just above the fastest to above the slowest."""
    times = [row.e2e for row in rows]
    return np.geomspace(1.02 * min(times), 1.1 * max(times), _GRID).tolist()


def least_margin(pairs: Sequence[Pair], share: float, bounds: Callable[[Sequence[Row]], Sequence[float]]) -> float:
    """The smallest margin with which at most this share of the picks break."""
    return next(
        (float(m) for m in _MARGINS if picks(pairs, lambda row, m=m: m, bounds).broken <= share), float(_MARGINS[-1])
    )


def quantile_margin(pairs: Sequence[Pair], share: float) -> float:
    """What a configuration's measured e2e exceeds with at most that chance, by `planner/margins/risk.py`."""
    ratios = [row.e2e / prediction.e2e(row) for row, prediction in pairs]
    return error_law(ratios, "the other half's rows").margin(share)


def _groups(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    groups: dict[tuple[object, ...], list[Pair]] = defaultdict(list)
    for row, prediction in pairs:
        groups[*row.deployment, row.system, row.input_tokens, row.output_tokens].append((row, prediction))
    yield from (group for group in groups.values() if len(group) >= _LEAST_CANDIDATES)
