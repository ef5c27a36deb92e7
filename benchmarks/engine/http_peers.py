"""exeplan and vLLM as HTTP servers under one ragged load from one client: ttft, tpot and throughput.

    benchmarks/engine/install_peers.sh FOLDER vllm
    python -m benchmarks.engine.http_peers --peers FOLDER [--repeats 3] [--requests 128] [--concurrency 32]

A Llama of 50 million parameters (random weights, one checkpoint, float32), a tokenizer of one word a token. Prompts of
16 to 240 tokens and as many output tokens, evenly spread; so many clients, each with its next request when it has an
answer, all by `exeplan bench URL`. A server has one core and one thread, the client another core. exeplan profiles the
model on that core, plans for as many requests at once as there are clients, and serves the plan; vLLM is given the same
number and nothing else. Servers alternate within a repeat and each starts anew; medians are reported. A server that
fails is said, and the others go on. Writes records/http-peers.json.

Not here: OpenVINO's model server, which no package index of Python has (`ovms` is a program of its own), and engines
without HTTP (`throughput.py`).
"""

import argparse
import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine.throughput import VOCABULARY, make_checkpoint
from benchmarks.lib.record import write_record
from benchmarks.lib.vllm_server import exeplan_command, vllm_server, write_tokenizer
from benchmarks.service.serving import served
from exeplan.planner.reports.tables import table
from exeplan.units import show_seconds

WORKLOAD = "quantiles:in=p0:16,p50:128,p100:240;out=p0:16,p50:128,p100:240"
SERVERS = ("exeplan", "vllm")
FIGURES = ("token_throughput", "ttft", "tpot", "longest_gap")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="environments that install_peers.sh made")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--budget", default="60s", help="of exeplan's profile")
    parser.add_argument("--itl", metavar="TIME", help="bound on every gap between two tokens of exeplan's plan")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    args = parser.parse_args()
    os.environ |= _ONE_THREAD
    found: dict[str, list[dict[str, float]]] = {name: [] for name in _present(args)}
    failures: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        setup = _Setup(args, folder)
        for repeat in range(args.repeats):
            for server, runs in found.items():
                try:
                    runs.append(setup.measure(server))
                except (SystemExit, subprocess.SubprocessError, OSError) as error:
                    failures.setdefault(server, []).append(str(error))
                    print(f"{server} failed in repeat {repeat + 1}: {error}", flush=True)
                else:
                    print(f"{repeat + 1}/{args.repeats} {server}: {_shown(runs[-1])}", flush=True)
        schedule = setup.schedule
    _report(found, failures, schedule, vars(args))


def _present(args: argparse.Namespace) -> list[str]:
    print("OpenVINO's model server is left out: it is a program of its own, not a package of Python")
    if "vllm" not in args.servers or (args.peers and (args.peers / "vllm" / "bin" / "python").exists()):
        return args.servers
    print("vllm is left out: no environment; benchmarks/engine/install_peers.sh FOLDER vllm makes one")
    return [name for name in args.servers if name != "vllm"]


class _Setup:
    """The checkpoint, and exeplan's plan for it."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args, self._folder, self._model = args, folder, folder / "model"
        make_checkpoint(str(self._model), "llama-50m")
        write_tokenizer(self._model, VOCABULARY)
        cores = sorted(os.sched_getaffinity(0))
        self._server_core, self._client_core = {cores[-1]}, {cores[0]}
        self._plan = folder / "plan.yaml"
        self.schedule = ""

    def measure(self, server: str) -> dict[str, float]:
        """One run of the load on a server that has just started. Raises SystemExit where it fails."""
        with self._started(server) as url, _pinned(self._client_core):
            options = ["--workload", WORKLOAD, "--requests", str(self._args.requests), "--vocab-size", str(VOCABULARY)]
            load = ["--concurrency", str(self._args.concurrency), "--json"]
            warm = [*options[:2], "--requests", "2", *options[4:], "--json"]
            exeplan_command("bench", url, *warm)
            answer = json.loads(exeplan_command("bench", url, *options, *load))
        measured: dict[str, Any] = answer["measured"]
        return {**{name: measured[name] for name in FIGURES[:3]}, "longest_gap": answer["longest_gap"]["measured"]}

    @contextmanager
    def _started(self, server: str) -> Iterator[str]:
        with contextlib.ExitStack() as stack:
            with _pinned(self._server_core):
                if server == "exeplan":
                    self._make_plan()
                    log = self._folder / "exeplan.log"
                    url = stack.enter_context(served(self._plan, log=log)).url
                else:
                    url = stack.enter_context(self._vllm())
            yield url

    def _vllm(self) -> Any:
        options = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", str(self._args.concurrency)]
        words = ["VLLM_CPU_OMP_THREADS_BIND=nobind", "VLLM_CPU_KVCACHE_SPACE=2", "vllm", "serve", str(self._model)]
        words += [*options, "--no-enable-prefix-caching"]
        python = self._args.peers / "vllm" / "bin" / "python"
        return vllm_server(python, words, self._folder, more=_ONE_THREAD, weights="auto")

    def _make_plan(self) -> None:
        """Once, on the server's core."""
        if self._plan.exists():
            return
        profile = self._folder / "profile.json"
        exeplan_command("profile", str(self._model), "-o", str(profile), "--budget", self._args.budget)
        bounds = ["--latency-bound", "inf", "--max-num-seqs", str(self._args.concurrency)]
        bounds += ["--itl", self._args.itl] if self._args.itl else []
        told = exeplan_command(
            "optimize", "--profile", str(profile), "--workload", WORKLOAD, *bounds, "-o", str(self._plan), "--json"
        )
        self.schedule = json.dumps(json.loads(told)["schedule"])


@contextmanager
def _pinned(cores: set[int]) -> Iterator[None]:
    """What is started meanwhile runs on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _shown(run: dict[str, float]) -> str:
    times = ", ".join(f"{name.replace('_', ' ')} {show_seconds(run[name])}" for name in FIGURES[1:])
    return f"{run['token_throughput']:.0f} tok/s, {times}"


def _report(
    found: dict[str, list[dict[str, float]]], failures: dict[str, list[str]], schedule: str, options: dict[str, Any]
) -> None:
    medians = {
        server: {name: median(run[name] for run in runs) for name in FIGURES} for server, runs in found.items() if runs
    }
    rows = [(server, f"{one['token_throughput']:.0f}", *_times(one)) for server, one in medians.items()]
    print()
    print(table(("", "tok/s", "mean ttft", "mean tpot", "longest gap"), rows))
    for server, errors in failures.items():
        print(f"{server} failed {len(errors)} times of {options['repeats']}")
    body = {
        "workload": WORKLOAD,
        "requests": options["requests"],
        "concurrency": options["concurrency"],
        "itl": options["itl"],
        "schedule": schedule,
        "runs": found,
        "medians": medians,
        "failures": failures,
    }
    if not medians:
        raise SystemExit("no server gave a figure")
    print(f"\nrecord: {write_record('http-peers', body)}")


def _times(one: dict[str, float]) -> list[str]:
    return [show_seconds(one[name]) for name in FIGURES[1:]]


if __name__ == "__main__":
    main()
