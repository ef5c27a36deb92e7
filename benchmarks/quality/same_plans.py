"""The same planning problems in two trees of exeplan: every plan, estimate, replay and refusal compared.

    python -m benchmarks.quality.same_plans OTHER_TREE [--cases 50] [--seed 0] [--quick]

OTHER_TREE is a checkout of another commit. The problems: every model, device, cluster, workload and engine under plans/
at least once, and every policy by its name; plans written by hand; tables of plans; traces that drift; and --cases
random problems. Each tree runs all of them in one process of its own, on one core, through the command line alone
(`exeplan.cli.main`), so that modules may move and change their names between the trees.

Files that are written (plans, profiles, timelines) must agree in every field, to the last digit. In what is printed
with --json every value that both trees print must agree, and a key that only one of them prints is listed. Of sentences
only the numbers are compared, because their words may change. `IGNORED` and `SENTENCES` name these fields and say why.
Exit status 1 where anything differs. Writes records/same-plans.json; with --quick, a handful of problems, no record.

Not here: tokens and timings (`benchmarks/engine`, `benchmarks/service`).
"""

import argparse
import contextlib
import csv
import io
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import groupby, islice, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
_SHOWN, _FIELDS = 20, 3
"""Commands whose results differ or whose sentences have other words, and fields of each, that are printed."""
_RECORDED = 500

# --- what is compared, and how ----------------------------------------------------------------------------------------

IGNORED = {"*search.seconds": "the time that the search took"}
"""Fields that are not compared, by the end of their path, and why."""
SENTENCES = {
    "*.refusal": "why a policy, a size or a row of a table has no plan",
    "*.refusals.*": "the same in an explanation",
    "*.nearest": "what would be possible, in a few words",
    "*.limits.*": "what limits a plan, in an explanation",
    "*.change": "what an explanation would change",
    "*.note": "what an explanation remarks",
    "*.extrapolated.*": "where an estimate leaves the measured range",
    "*.what": "the label of a field of a plan that differs",
    "*.reason": "why a service would re-plan",
    "*.verdict": "what a look at the drift concludes",
    "*.source": "where a profile or a margin comes from, which may name a file of the tree",
    "*.traceEvents.*.name": "the label of a span in a timeline",
}
"""Fields of which only the numbers are compared, and what they say."""
_WORD = re.compile(r"\b[A-Za-z_][\w.]*(?:-[\w.]+)*")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Difference:
    """A field that differs; `only_in` names the tree that has the key where the other has none."""

    where: str
    ours: str
    theirs: str
    only_in: str = ""

    @property
    def listed_only(self) -> bool:
        """A key that only one tree prints is listed; one that only one tree writes to a file is a difference."""
        return bool(self.only_in) and self.where.startswith("stdout.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one command did: its exit status, what it said, and the values it printed and wrote, by file."""

    status: int | str
    """In place of a number the type of an exception that nothing caught."""
    said: str
    """On standard error, and on standard output where that is no JSON."""
    values: Mapping[str, Any]


def numbers(text: str) -> list[float]:
    """The numbers of a sentence, ascending; digits that are part of a name, such as t5-11b or p99, are not."""
    found = _NUMBER.findall(_WORD.sub(" ", text))
    return sorted(float(number.replace(",", "")) for number in found)


def differences(ours: Any, theirs: Any, where: str) -> Iterator[Difference]:
    """Every field of two values of JSON or YAML that differs: 4 and 4.0 do, the order of keys does not count."""
    if _exact(ours) == _exact(theirs):
        return
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in sorted(ours.keys() | theirs.keys(), key=str):
            at = f"{where}.{key}"
            if key in ours and key in theirs:
                yield from differences(ours[key], theirs[key], at)
            elif not _matches(at, IGNORED):
                only_in = "this tree" if key in ours else "the other tree"
                yield Difference(at, _short(ours.get(key, "-")), _short(theirs.get(key, "-")), only_in)
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(*pair, f"{where}.{number}")
    elif not (_matches(where, IGNORED) or _same_sentence(ours, theirs, where)):
        yield Difference(where, _short(ours), _short(theirs))


def outcome_differences(ours: Outcome, theirs: Outcome) -> Iterator[Difference]:
    """Exit status, numbers in what was said, printed values and written files of one command in the two trees."""
    if ours.status != theirs.status:
        yield Difference("exit status", f"{ours.status} {ours.said}", f"{theirs.status} {theirs.said}")
    elif numbers(ours.said) != numbers(theirs.said):
        yield Difference("numbers said", ours.said, theirs.said)
    for file in sorted(ours.values.keys() | theirs.values.keys()):
        if file in ours.values and file in theirs.values:
            yield from differences(ours.values[file], theirs.values[file], file)
        elif ours.status == theirs.status:
            only_in = "this tree" if file in ours.values else "the other tree"
            yield Difference(file, "-", "-", only_in)


def _exact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _same_sentence(ours: Any, theirs: Any, where: str) -> bool:
    both = isinstance(ours, str) and isinstance(theirs, str) and _matches(where, SENTENCES)
    return both and numbers(ours) == numbers(theirs)


def _matches(where: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(where, pattern) for pattern in patterns)


def _short(value: Any) -> str:
    text = _exact(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def num_shared(ours: Any, theirs: Any) -> int:
    """Numbers, texts and nulls that two values of JSON or YAML both have: what `differences` compares."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return sum(num_shared(value, theirs[key]) for key, value in ours.items() if key in theirs)
    if isinstance(ours, list) and isinstance(theirs, list):
        return sum(map(num_shared, ours, theirs))
    return 1


# --- problems ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Problem:
    """Commands that follow from each other: after one that fails none runs."""

    group: str
    commands: tuple[str, ...]
    """Without `exeplan`, words parted by spaces. They run in a folder of the problem's own; profiles and given files
    are one folder up."""


POLICIES = ("chunked", "concat", "orca", "rra", "static", "turbo", "waa-c", "waa-m")
ORDERS = ("fcfs", "sjf", "edf", "das")
MACHINES = {
    "demo": ("cpu-generic", "cpu", (1, 2), 0.0009),
    "demo-experts": ("cpu-generic", "cpu", (1, 2), 0.0009),
    "llama-50m": ("cpu-generic", "cpu", (1, 2), 0.02),
    "tcb-small": ("cpu-generic", "cpu", (1,), 0.0006),
    "tcb-transformer": ("a100-40gb", "", (1,), 0.003),
    "llama-2-7b": ("a100-40gb", "", (1,), 0.012),
    "flan-t5-xxl": ("a100-80gb", "a100", (1, 2), 0.015),
    "qwen3-8b": ("a100-80gb", "a100", (1, 2, 4), 0.011),
    "gpt3-39b": ("a100-80gb", "a100", (2, 4), 0.045),
    "gpt3-101b": ("a100-80gb", "a100", (8,), 0.11),
    "gpt3-175b": ("a100-80gb", "a100", (8,), 0.19),
    "opt-13b": ("a40-48gb", "a40", (1, 2, 4, 8), 0.045),
    "t5-11b": ("a40-48gb", "a40", (1, 2, 4), 0.025),
    "opt-66b": ("a40-48gb", "a40", (4,), 0.2),
    "gpt3-341b": ("a40-48gb", "a40", (32,), 1.0),
    "llama-3.1-8b": ("h100-80gb", "h100", (1, 2, 4), 0.007),
    "mistral-7b": ("h100-80gb", "h100", (1, 2), 0.006),
    "llama-2-70b": ("h100-80gb", "h100", (2, 4, 8), 0.05),
    "llama-3.1-70b": ("h200-141gb", "h200", (2, 4, 8), 0.036),
    "qwen3-32b": ("h200-141gb", "h200", (1, 2, 4), 0.018),
    "qwen3-30b-a3b": ("h100-80gb", "h100", (1, 2), 0.012),
    "mixtral-8x7b": ("h100-80gb", "h100", (2, 4), 0.012),
    "qwen3-235b-a22b": ("h100-80gb", "h100", (8,), 0.03),
    "deepseek-v2-lite": ("h100-80gb", "h100", (1, 2), 0.008),
    "deepseek-v3": ("h200-141gb", "h200", (8,), 0.04),
    "minimax-m2": ("h100-80gb", "h100", (8,), 0.03),
}
"""Where each model runs: device, cluster, numbers of GPUs, and about what a decode iteration takes there in seconds, so
that random bounds are neither hopeless nor idle."""
SHIPPED = """
demo             1    alpaca           --latency-bound 3s --fit-context
demo             1    alpaca           --latency-bound 0.01s --fit-context
demo             2    wmt17-ende       --latency-bound 2s --ttft 0.3s --tpot 20ms
demo             2    alpaca           --latency-bound 3s --fit-context --risk 1% --policy rra
demo-experts     1    alpaca           --latency-bound 8s --fit-context
llama-50m        1    C1               --latency-bound 12s --arrival-rate 0.5 --policy orca
llama-50m        2    G                --latency-bound 40s --method bayesian --max-num-seqs 64 --policy orca
tcb-small        1    wmt17-ende       --deadline 2s --arrival-rate 40
tcb-small        1    wmt17-ende       --deadline 0.5s,2s --deadline-share 95% --arrival-rate 60 --policy rra
tcb-transformer  1    wmt17-ende       --deadline 1s --arrival-rate 30 --policy concat
tcb-transformer  1    wmt17-ende       --deadline 1s --arrival-rate 30 --policy turbo --order sjf
llama-2-7b       1    azure-2023-conv  --latency-bound 60s --fit-context
llama-2-7b       1    C2               --latency-bound 20s --bound-on p99-requests --memory 30GiB
flan-t5-xxl      1    S                --latency-bound 6s
flan-t5-xxl      2    alpaca           --latency-bound 20s --fit-context
qwen3-8b         2    azure-2023-code  --latency-bound 5s --ttft 2s
qwen3-8b         2    S                --latency-bound 20s --arrival-rate 4 --gpu-memory-utilization 0.85
gpt3-39b         4    T                --latency-bound 40s
gpt3-101b        8    S                --latency-bound 30s
gpt3-175b        16   S                --latency-bound 15s --policy rra
opt-13b          1    C2               --latency-bound 120s
opt-13b          4    S                --latency-bound 11.5s --explain
opt-13b          8    T                --latency-bound 10s --across-nodes --policy chunked
opt-13b          auto S                --latency-bound 6s --arrival-rate 10 --policy orca
opt-13b          4    S                --latency-bound 0.5s
t5-11b           4    wmt17-ende       --latency-bound 8s
t5-11b           2    C1               --latency-bound 30s --bound-on p50-requests
opt-66b          4    C1               --latency-bound 80s --min-throughput 1
gpt3-341b        48   T                --latency-bound 400s --policy rra
llama-3.1-8b     1    mooncake-conv    --latency-bound 120s --fit-context
llama-3.1-8b     2    C1               --latency-bound 2s --explain --policy waa-c
mistral-7b       1    azure-2023-code  --latency-bound inf
mistral-7b       2    S                --latency-bound 3s --tpot 15ms
llama-2-70b      4    G                --latency-bound 40s
llama-3.1-70b    4    azure-2023-conv  --latency-bound 60s --policy chunked
llama-3.1-70b    2    S                --latency-bound 20s --risk 5% --policy static
qwen3-32b        2    mooncake-conv    --latency-bound 100s --fit-context --policy waa-m
qwen3-32b        1    alpaca           --latency-bound inf --method exhaustive --max-num-seqs 12
qwen3-30b-a3b    2    azure-2023-conv  --latency-bound 20s
mixtral-8x7b     4    S                --latency-bound 10s --arrival-rate 4
qwen3-235b-a22b  8    azure-2023-conv  --latency-bound 30s --policy rra
deepseek-v2-lite 1    S                --latency-bound 10s
deepseek-v3      8    S                --latency-bound 60s --policy orca
minimax-m2       8    S                --latency-bound 60s --policy chunked
"""
"""Model, GPUs (1 is the device without a cluster), workload, options of `optimize`."""
BY_POLICY = """
opt-13b          4    S                --latency-bound 8s
llama-3.1-8b     1    T                --latency-bound 4s
t5-11b           2    wmt17-ende       --latency-bound 10s
"""
"""Planned with each policy by its name; on one device waa-c and waa-m cannot be placed."""
TIGHTER = """
demo             2    alpaca           --latency-bound 3s --fit-context
opt-13b          4    S                --latency-bound 11.5s
t5-11b           2    S                --latency-bound 12s
"""
"""Planned again with a third of the bound, and the two plans compared."""
DRIFTS = """
demo             1    ../calm.csv      --latency-bound 1s
opt-13b          4    ../calm.csv      --latency-bound 20s
t5-11b           2    ../calm.csv      --latency-bound 20s --policy rra
"""
TABLES = (
    "--profile ../demo.json ../llama-50m.json --workload alpaca C1 --latency-bound 5s --policy rra --fit-context",
    "--profile ../opt-13b.json ../t5-11b.json --cluster a40 --gpus 1,2 --workload S --latency-bound 1s,6s --json",
    "--profile ../opt-13b.json ../llama-3.1-8b.json --cluster h100 a40 --gpus 2 --workload T --latency-bound 9s --json",
)
"""Arguments of `compare`."""
_ALL, _TWO = "[{devices: [0], layers: [0, 40]}]", "[{devices: [0], layers: [0, 18]}, {devices: [1], layers: [18, 40]}]"
_WIDE = "[{devices: [0, 1], layers: [0, 30]}, {devices: [2], layers: [30, 40]}]"
_APART = "[{devices: [0], layers: [0, 40], phase: prefill}, {devices: [1], layers: [0, 40], phase: decode}]"
_T5 = "[{devices: [0], layers: [0, 0], encoder_layers: [0, 24]}, {devices: [1, 2], layers: [0, 24]}]"
BY_HAND = (
    ("opt-13b", "S", _TWO, "policy: static, batch_size: 24, micro_batches: 2"),
    ("opt-13b", "T", _WIDE, "policy: orca, max_num_seqs: 40, order: sjf"),
    ("opt-13b", "C1", _WIDE, "policy: chunked, max_num_seqs: 40, max_num_batched_tokens: 300, max_num_prefills: 2"),
    ("opt-13b", "G", _TWO, "policy: rra, prefill_batch: 20, decode_steps: 10, micro_batches: 3"),
    (
        "opt-13b",
        "S",
        _ALL,
        "policy: rra, prefill_batch: 8, decode_steps: 6, adjust_percent: 10, prefill_tokens: 2050, decode_batch: 40",
    ),
    ("opt-13b", "S", _APART, "policy: waa-c, prefill_batch: 2, decode_batch: 50, micro_batches: 2"),
    (
        "opt-13b",
        "S",
        _APART,
        "policy: waa-m, prefill_batch: 2, decode_batch: 50, adjust_percent: 20, prefill_tokens: 512",
    ),
    ("opt-13b", "S", _ALL, "policy: concat, rows: 16, row_tokens: 900, slot_tokens: 300, order: das"),
    ("opt-13b", "S", _ALL, "policy: concat, rows: 16, row_tokens: 900, order: slotted-das, eta_percent: 40"),
    ("opt-13b", "S", _ALL, "policy: turbo, batch_size: 32, overhead_tokens: 40"),
    ("t5-11b", "S", _T5, "policy: rra, prefill_batch: 16, decode_steps: 12"),
    ("t5-11b", "S", _T5, "policy: orca, max_num_seqs: 64"),
    ("opt-13b", "S", _TWO, "policy: rra, prefill_batch: 4"),
    ("opt-13b", "S", "[{devices: [0], layers: [0, 39]}]", "policy: orca, max_num_seqs: 8"),
)
"""Plans written by hand: model, workload, placement, schedule. The last two are wrong."""
TIMINGS = {
    "h100.csv": {"decode": 2.5e-9, "prefill": 1e-7, "rest": 8e-7, "layer": 2e-4, "head": 4e-4, "link": 4e-12},
    "cpu.csv": {"decode": 1.5e-7, "prefill": 3e-6, "rest": 2e-5, "layer": 4e-4, "head": 3e-4, "link": 4e-10},
}
"""Seconds of made-up tables to import: a token of the context, of a prompt, of the rest of a layer; a layer, a head; a
byte on a link."""
IMPORTED = (
    *(
        (f"h100.csv --model llama-3.1-8b --device h100-80gb --engine {engine}", "--cluster h100 --gpus 4 --workload C1")
        for engine in ("vllm", "sglang", "trtllm")
    ),
    ("cpu.csv --model demo --device cpu-generic --dtype float32", "--gpus 2 --workload alpaca --fit-context"),
)
"""Arguments of `profile import`, and of `optimize` with the profile."""
CORRECTED = (
    "--model Qwen/Qwen3-235B-A22B-FP8 --cluster h100 --gpus 8 --engine vllm --workload S --latency-bound 60s",
    "--model llama-3.1-8b --cluster h100 --gpus 2 --engine trtllm --workload C1 --latency-bound 20s --risk 5%",
)
"""Arguments of `optimize` without a profile: a datasheet's times, corrected by the runs in plans/calibration."""
DRIFTED = ("steady.csv", "longer.csv", "shorter.csv")
"""Traces on which the plans of DRIFTS are watched."""
ARRIVALS = 8.0
"""Requests a second of the traces."""
TRACES = {
    "calm.csv": ((900, 60, 40),),
    "steady.csv": ((900, 60, 40),),
    "longer.csv": ((500, 60, 40), (1200, 60, 90)),
    "shorter.csv": ((500, 60, 40), (1200, 30, 15)),
}
"""Traces that are drawn: requests, mean input and mean output of each part."""
_LONGEST_SHIPPED = 300
"""Output tokens: about the 99th percentile of the shipped workloads."""


def problems(cases: int, seed: int, *, quick: bool = False) -> list[Problem]:
    """The profiles that are needed, and all problems; a quick run has the first problem of each group."""
    found = [
        *_planned("shipped", SHIPPED),
        *(problem for policy in POLICIES for problem in _planned("by policy", BY_POLICY, f"--policy {policy}")),
        *_tightened(),
        *_drifting(),
        *_by_hand(),
        *_imported(),
        *(Problem("corrected", (f"optimize {options} --json -o plan.yaml",)) for options in CORRECTED),
        *(Problem("table", (f"compare {options} --csv rows.csv",)) for options in TABLES),
        *(_drawn(random.Random(f"{seed} {number}")) for number in range(cases)),
    ]
    if quick:
        found = list({problem.group: problem for problem in reversed(found)}.values())[::-1]
    return [*_profiles(found, quick=quick), *found]


def _rows(table: str) -> list[list[str]]:
    """Model, GPUs, workload and options of each line."""
    return [line.split(maxsplit=3) for line in table.strip().splitlines()]


def _profiles(found: Sequence[Problem], *, quick: bool) -> Iterator[Problem]:
    text = " ".join(command for problem in found for command in problem.commands)
    for model, (device, cluster, _, _) in MACHINES.items():
        links = f"--cluster {cluster}" if cluster else ""
        if f"../{model}.json" in text:
            yield Problem("profile", (f"profile {model} --datasheet {device} {links} -o ../{model}.json",))
    for device in [] if quick else sorted({machine[0] for machine in MACHINES.values()}):
        given = "--dtype float16 --set gemm_efficiency=0.6 --tensor-parallel-sizes 1,4"
        yield Problem("profile", (f"profile mistral-7b --datasheet {device} {given} -o profile.json",))


def _planned(group: str, table: str, more: str = "") -> Iterator[Problem]:
    for model, gpus, workload, options in _rows(table):
        replay = "simulate plan.yaml --requests 300 --seed 1 --json -o simulated.yaml --timeline timeline.json"
        yield Problem(group, (_optimize(model, gpus, workload, f"{options} {more}".strip()), replay))


def _optimize(model: str, gpus: str, workload: str, options: str, plan: str = "plan.yaml") -> str:
    cluster = "" if gpus == "1" else f"--cluster {MACHINES[model][1]} --gpus {gpus} "
    return f"optimize --profile ../{model}.json {cluster}--workload {workload} {options} --json -o {plan}"


def _tightened() -> Iterator[Problem]:
    for model, gpus, workload, options in _rows(TIGHTER):
        _, bound, *rest = options.split()
        tighter = " ".join(("--latency-bound", f"{float(bound.removesuffix('s')) / 3:g}s", *rest))
        plans = (_optimize(model, gpus, workload, options), _optimize(model, gpus, workload, tighter, "tight.yaml"))
        yield Problem("tighter", (*plans, "diff plan.yaml tight.yaml --json", "diff plan.yaml tight.yaml"))


def _drifting() -> Iterator[Problem]:
    watched = tuple(f"drift ../{trace} --plan plan.yaml --every 10s --dwell 20s --json" for trace in DRIFTED)
    yield from (Problem("drift", (_optimize(*row), *watched)) for row in _rows(DRIFTS))


def _by_hand() -> Iterator[Problem]:
    for number, (model, workload, *_) in enumerate(BY_HAND):
        given = f"simulate ../hand-{number}.yaml --profile ../{model}.json --workload {workload} --json"
        yield Problem("by hand", (f"{given} -o filled.yaml", f"{given} --requests 300 --steady-state paper"))


def _imported() -> Iterator[Problem]:
    for table, plan in IMPORTED:
        searched = f"optimize --profile profile.json {plan} --latency-bound 10s --json -o plan.yaml"
        yield Problem("imported", (f"profile import ../{table} -o profile.json", searched))


def _drawn(rng: random.Random) -> Problem:
    """A random problem: most have a plan, some ask for more than there is."""
    model = rng.choice(sorted(MACHINES))
    _, _, sizes, step = MACHINES[model]
    gpus = rng.choice(sizes)
    backlog = gpus > 2 or rng.random() < 0.6
    workload, longest = _random_shipped(rng) if backlog and rng.random() < 0.5 else _random_law(rng)
    asked = (_random_bounds if backlog else _random_load)(rng, longest, step)
    options = " ".join((*asked, *_random_rest(rng, gpus)))
    planned = _optimize(model, str(gpus), f"{workload} --fit-context", options)
    return Problem("random", (planned, f"simulate plan.yaml --requests 400 --seed {rng.randrange(100)} --json"))


def _random_shipped(rng: random.Random) -> tuple[str, int]:
    """A shipped workload and about its longest output."""
    return rng.choice(sorted(path.stem for path in (ROOT / "plans" / "workloads").glob("*.yaml"))), _LONGEST_SHIPPED


def _random_law(rng: random.Random) -> tuple[str, int]:
    """A law, or quantiles, and its longest output."""
    prompt, output = int(_between(rng, 12, 300)), int(_between(rng, 8, 90))
    spread = rng.uniform(0.2, 0.8)
    law = rng.choice(("normal", "lognormal", "uniform", "fixed", "quantiles"))
    if law == "uniform":
        return f"uniform:in={prompt // 2}-{prompt * 2};out={output // 2}-{output * 2}", 2 * output
    if law == "fixed":
        return f"fixed:in={prompt};out={output}", output
    if law == "quantiles":
        points = (f"p50:{mean},p90:{2 * mean},p99:{3 * mean}" for mean in (prompt, output))
        return "quantiles:in={};out={};rank_correlation={:.2f}".format(*points, rng.uniform(-0.5, 0.9)), 3 * output
    sides = (f"{mean},{max(1, int(mean * spread))},{3 * mean}" for mean in (prompt, output))
    return "{}:in={};out={}".format(law, *sides), 3 * output


def _random_bounds(rng: random.Random, longest: int, step: float) -> Iterator[str]:
    """Bounds under a backlog."""
    alone = longest * step
    yield "--latency-bound inf" if rng.random() < 0.1 else f"--latency-bound {alone * _between(rng, 1.3, 12):.3g}s"
    if rng.random() < 0.3:
        yield f"--bound-on {rng.choice(('p99-requests', 'p90-requests', 'p50-requests'))}"
    if rng.random() < 0.2:
        yield f"--ttft {step * _between(rng, 5, 100):.3g}s"
    if rng.random() < 0.2:
        yield f"--tpot {step * _between(rng, 1.3, 6):.3g}s"
    if rng.random() < 0.2:
        yield f"--risk {rng.choice(('1%', '5%', '0.1'))}"
    if rng.random() < 0.15:
        yield f"--min-throughput {_between(rng, 0.3, 10) / alone:.3g}"


def _random_load(rng: random.Random, longest: int, step: float) -> Iterator[str]:
    """A rate of arrivals, and a bound or deadlines."""
    alone = longest * step
    yield f"--arrival-rate {_between(rng, 0.3, 6) / alone:.3g}"
    if rng.random() < 0.5:
        yield f"--latency-bound {alone * _between(rng, 3, 30):.3g}s"
        return
    deadlines = sorted(alone * _between(rng, 3, 30) for _ in range(rng.randint(1, 2)))
    yield f"--deadline {','.join(f'{seconds:.3g}s' for seconds in deadlines)}"
    yield rng.choice(("", "--deadline-share 90%"))


def _random_rest(rng: random.Random, gpus: int) -> Iterator[str]:
    if gpus > 4 or rng.random() < 0.6:
        yield f"--policy {rng.choice([name for name in POLICIES if gpus > 1 or not name.startswith('waa')])}"
    if rng.random() < 0.3:
        yield f"--order {rng.choice(ORDERS)}"
    if rng.random() < 0.1:
        yield f"--max-num-seqs {rng.randint(4, 200)}"
    if rng.random() < 0.1:
        yield "--across-nodes"


def _between(rng: random.Random, low: float, high: float) -> float:
    """Log-uniform."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def unused(found: Sequence[Problem], tree: Path = ROOT) -> list[str]:
    """Files under plans/ that no problem names, but those that belong to a device or an engine."""
    words = set(re.split(r"[\s/]+", " ".join(command for problem in found for command in problem.commands)))
    every = sorted((tree / "plans").glob("*/*.yaml"))
    files = [file for file in every if file.parent.name not in ("errors", "calibration", "kernels")]
    return [str(file.relative_to(tree)) for file in files if not {file.stem, f"{file.stem}.json"} & words]


# --- files that problems read -----------------------------------------------------------------------------------------


def given_files(seed: int) -> dict[str, str]:
    """Traces, tables to import and plans by hand, by name."""
    traces = {name: _trace(parts, random.Random(f"{seed} {name}")) for name, parts in TRACES.items()}
    tables = {name: _timings(seconds) for name, seconds in TIMINGS.items()}
    plans = {
        f"hand-{number}.yaml": f"model: {model}\nschedule: {{{schedule}}}\nplacement: {placement}\n"
        for number, (model, _, placement, schedule) in enumerate(BY_HAND)
    }
    return {**traces, **tables, **plans}


def _trace(parts: Sequence[tuple[int, int, int]], rng: random.Random) -> str:
    lines, now = ["arrival_s,input_tokens,output_tokens"], 0.0
    for count, *means in parts:
        for _ in range(count):
            now += rng.expovariate(ARRIVALS)
            lengths = (min(1 + int(rng.expovariate(1 / mean)), 5 * mean) for mean in means)
            lines.append(",".join((f"{now:.4f}", *map(str, lengths))))
    return "\n".join((*lines, ""))


def _timings(seconds: Mapping[str, float]) -> str:
    """A table as `profile import` reads it, all times linear in their axes."""
    header = "op,phase,tensor_parallel_size,num_seqs,num_tokens,context_tokens,bytes,seconds"
    sizes = (1, 8, 64, 512)
    rows = [f"overhead,{phase},1,{n},,,,{1e-3 + 1e-5 * n}" for phase in ("prefill", "decode") for n in sizes]
    rows += [f"control,,1,{n},,,,{2e-4 + 1e-6 * n}" for n in sizes]
    rows += [f"send,{link},1,,,,{n},{2e-5 + seconds['link'] * n}" for link in ("intra", "inter") for n in (1024, 2**26)]
    for tp in (1, 2, 4):
        for n in (16, 128, 1024, 8192):
            rows.append(f"attention,prefill,{tp},1,{n},,,{3e-5 + seconds['prefill'] * n * (1 + n / 4096) / tp}")
            rows += [
                f"attention,decode,{tp},{seqs},,{n * seqs},,{4e-5 + seconds['decode'] * n * seqs / tp}"
                for seqs in (1, 16, 128)
            ]
            rows.append(f"rest,,{tp},,{n},,,{(seconds['layer'] + seconds['rest'] * n) / tp + 2e-5}")
            rows.append(f"embed,,{tp},,{n},,,{1e-5 + seconds['rest'] * n / 8}")
        rows += [f"head,,{tp},{n},,,,{seconds['head'] / tp + seconds['rest'] * 4 * n}" for n in sizes]
        if tp > 1:
            rows += [f"all_reduce,intra,{tp},,,,{n},{3e-5 + 2 * seconds['link'] * n}" for n in (1024, 2**26)]
    return "\n".join((header, *rows, ""))


# --- the two trees ----------------------------------------------------------------------------------------------------


class Tree:
    """A tree of exeplan that runs commands in one process, in a folder of its own."""

    def __init__(self, root: Path, folder: Path, files: Mapping[str, str], *, core: int | None) -> None:
        """Raises SystemExit where the root is no tree of exeplan."""
        if not (root / "exeplan" / "cli.py").exists():
            raise SystemExit(f"{root} is no tree of exeplan: it has no exeplan/cli.py")
        self.root, self.folder, self.seconds = root, folder, 0.0
        for name, text in files.items():
            (folder / name).write_text(text)
        quiet = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "COLUMNS": "200"}
        self._driver = subprocess.Popen(
            [sys.executable, __file__, "--drive", str(root), *([str(core)] if core is not None else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, **quiet, "PYTHONPATH": str(root)},
        )

    @property
    def commit(self) -> str:
        command = ["git", "-C", str(self.root), "describe", "--always", "--dirty"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        return answer.stdout.strip() or "unknown"

    def run(self, number: int, problem: Problem) -> list[Outcome]:
        """What the commands of a problem did, up to the first that failed."""
        folder = self.folder / f"{number:03}"
        folder.mkdir()
        outcomes: list[Outcome] = []
        for command in problem.commands:
            outcomes.append(self._command(folder, command.split()))
            if outcomes[-1].status != 0:
                break
        return outcomes

    def close(self) -> None:
        """Ends the process."""
        self._driver.communicate()

    def _command(self, folder: Path, words: Sequence[str]) -> Outcome:
        assert self._driver.stdin
        assert self._driver.stdout
        self._driver.stdin.write(json.dumps({"folder": str(folder), "words": words}) + "\n")
        self._driver.stdin.flush()
        line = self._driver.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.root} ended in: {' '.join(words)}")
        answer = json.loads(line)
        self.seconds += answer["seconds"]
        printed, said = self._placeless(answer["printed"]), self._placeless(answer["said"])
        values = {name: self._read(folder / name) for name in _outputs(words) if (folder / name).exists()}
        if printed.startswith("{"):
            values["stdout"] = json.loads(printed)
        else:
            said = f"{said}{printed}"
        return Outcome(status=answer["status"], said=said.strip(), values=values)

    def _read(self, path: Path) -> Any:
        text = self._placeless(path.read_text())
        if path.suffix == ".csv":
            return list(csv.DictReader(io.StringIO(text)))
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)

    def _placeless(self, text: str) -> str:
        """The text without where this tree and its folder are."""
        return text.replace(str(self.folder), "FOLDER").replace(str(self.root), "TREE")


def _outputs(words: Sequence[str]) -> list[str]:
    """Files that a command writes."""
    options = ("-o", "--csv", "--timeline")
    return [after for word, after in pairwise(words) if word in options]


def drive(root: str, core: str | None = None) -> None:
    """The process of a tree: commands come in as lines of JSON, and what they did goes out as such."""
    sys.path.pop(0)  # The folder of this file: the tree comes first.
    if core is not None:
        os.sched_setaffinity(0, {int(core)})
    import exeplan
    from exeplan.cli import main as command

    if Path(exeplan.__file__).resolve().parents[1] != Path(root):
        raise SystemExit(f"exeplan is imported from {exeplan.__file__}, not from {root}")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        os.chdir(asked["folder"])
        started, printed, said = time.process_time(), io.StringIO(), io.StringIO()
        status: int | str
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
            try:
                status = command(asked["words"])
            except SystemExit as stop:
                status = stop.code if isinstance(stop.code, int) else str(stop.code)
            except Exception as error:  # A fault of the tree: compared as any other answer.
                status = type(error).__name__
                said.write(traceback.format_exc().splitlines()[-1])
        answer = {"status": status, "printed": printed.getvalue(), "said": said.getvalue()}
        print(json.dumps({**answer, "seconds": time.process_time() - started}), file=answers, flush=True)


# --- the report -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Report:
    """Counts by group, and what differed."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    values: int = 0
    """Values that both trees printed or wrote, and that were compared."""
    different: list[dict[str, str]] = field(default_factory=list)
    only_in_one: Counter[str] = field(default_factory=Counter)
    refusals: list[dict[str, str]] = field(default_factory=list)
    """What commands said that did not end with 0; the other tree's words where they are others."""

    def add(self, problem: Problem, ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> None:
        """Compares what a problem's commands did."""
        count = self.counts.setdefault(problem.group, Counter())
        num_different = len(self.different)
        for command, mine, other in zip(problem.commands, ours, theirs, strict=False):
            self.values += num_shared(mine.values, other.values)
            for difference in outcome_differences(mine, other):
                self._note(command, difference)
            if mine.status != 0:
                reworded = {"theirs": other.said} if other.said != mine.said else {}
                self.refusals.append({"command": command, "status": str(mine.status), "ours": mine.said, **reworded})
        statuses = [outcome.status for outcome in ours]
        count["problems"] += 1
        count["commands"] += len(ours)
        count["exit 2"] += statuses[-1] == 2
        count["faults"] += statuses[-1] not in (0, 2)
        count["same"] += len(self.different) == num_different

    def _note(self, command: str, difference: Difference) -> None:
        if difference.listed_only:
            self.only_in_one[f"{re.sub(r'[.][0-9]+', '.*', difference.where)} only in {difference.only_in}"] += 1
            return
        where = f"{difference.where} (only in {difference.only_in})" if difference.only_in else difference.where
        self.different.append(
            {"command": command, "where": where, "ours": difference.ours, "theirs": difference.theirs}
        )

    @property
    def total(self) -> Counter[str]:
        """The counts of all groups together."""
        total: Counter[str] = Counter()
        for count in self.counts.values():
            total.update(count)
        return total

    def lines(self) -> Iterator[str]:
        """The report for people."""
        names = ("problems", "commands", "same", "exit 2", "faults")
        yield f"{'':12}" + "".join(f"{name:>10}" for name in names)
        for group, count in [*self.counts.items(), ("all", self.total)]:
            yield f"{group:12}" + "".join(f"{count[name]:10}" for name in names)
        yield f"{self.values} values compared"
        yield from (f"{count} x {key}" for key, count in self.only_in_one.most_common())
        reworded = [refusal for refusal in self.refusals if "theirs" in refusal]
        yield f"{len(self.refusals)} commands did not end with 0, {len(reworded)} of them in other words"
        for refusal in reworded[:_SHOWN]:
            yield f"  {refusal['command']}\n    ours    {refusal['ours']}\n    theirs  {refusal['theirs']}"
        yield f"{len(self.different)} differences in {self.total['problems'] - self.total['same']} problems"
        for command, fields in islice(groupby(self.different, key=itemgetter("command")), _SHOWN):
            yield f"  {command}"
            for number, found in enumerate(fields):
                if number < _FIELDS:
                    yield f"    {found['where']}: ours {found['ours']}, theirs {found['theirs']}"


def compare_trees(ours: Tree, theirs: Tree, found: Sequence[Problem]) -> Report:
    """Runs all problems in both trees at once."""
    report, numbers_ = Report(), range(len(found))
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        pairs = zip(first.map(ours.run, numbers_, found), second.map(theirs.run, numbers_, found), strict=True)
        for number, (problem, pair) in enumerate(zip(found, pairs, strict=True), 1):
            report.add(problem, *pair)
            if sys.stderr.isatty():
                print(f"\r{number} of {len(found)} problems", end="", file=sys.stderr)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, metavar="OTHER_TREE")
    parser.add_argument("--cases", type=int, default=50, help="random problems (default 50)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="the first problem of each kind, and no record")
    args = parser.parse_args()
    found, files = problems(args.cases, args.seed, quick=args.quick), given_files(args.seed)
    if not args.quick and (left := unused(found)):
        raise SystemExit(f"no problem uses {', '.join(left)}: add one to SHIPPED")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [None]
    with (
        tempfile.TemporaryDirectory() as here,
        tempfile.TemporaryDirectory() as there,
        contextlib.closing(Tree(ROOT, Path(here).resolve(), files, core=cores[0])) as ours,
        contextlib.closing(Tree(args.other.resolve(), Path(there).resolve(), files, core=cores[-1])) as theirs,
    ):
        report = compare_trees(ours, theirs, found)
    print(f"ours {ours.commit}, {ours.seconds:.0f} s; theirs {theirs.commit}, {theirs.seconds:.0f} s")
    print("\n".join(report.lines()))
    if not args.quick:
        from benchmarks.lib.record import write_record  # Not in a tree's own process, whose benchmarks may be others.

        print(f"record: {write_record('same-plans', _figures(args, report, ours, theirs))}")
    return 1 if report.different else 0


def _figures(args: argparse.Namespace, report: Report, ours: Tree, theirs: Tree) -> dict[str, Any]:
    return {
        "seed": args.seed,
        "commits": {"ours": ours.commit, "theirs": theirs.commit},
        "seconds": {"ours": round(ours.seconds, 1), "theirs": round(theirs.seconds, 1)},
        "values": report.values,
        "groups": {group: dict(count) for group, count in report.counts.items()},
        "all": dict(report.total),
        "not_compared": IGNORED,
        "numbers_only": SENTENCES,
        "keys_in_one_tree": dict(report.only_in_one),
        "differences": report.different[:_RECORDED],
        "refusals": report.refusals,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--drive"]:
        drive(*sys.argv[2:])
    else:
        sys.exit(main())
