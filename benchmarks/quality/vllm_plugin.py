"""exeplan's scheduler in vLLM: the tokens of plain vLLM, and the cadence of the plan in its trace.

    python -m benchmarks.quality.vllm_plugin --python FILE [--requests 60]

FILE is an interpreter that has vLLM, numpy and pyyaml. vLLM's offline engine runs the same greedy requests of random
lengths, all at once, on the demo's shape with random weights: as it schedules itself, and with the scheduler under
several cadences. Compared are all tokens; the trace must have B_E requests in each prefill while so many wait and there
are slots, and at least N_D decode passes between two prefills while anything decodes. Throughputs are of one run each.
Writes records/vllm-plugin.json.
"""

import argparse
import json
import os
import subprocess
import tempfile
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import exeplan
from benchmarks.lib.record import write_record
from benchmarks.lib.vllm_server import write_model
from exeplan.planner.reports.tables import table

CADENCES = ((4, 4), (4, 16), (8, 8))
"""B_E and N_D."""
SLOTS = 24
_RUN = """
import json, random, sys, time
model, scheduler, count, slots = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

def main():
    from vllm import LLM, SamplingParams
    more = {"scheduler_cls": scheduler, "enable_chunked_prefill": False} if scheduler else {}
    llm = LLM(model=model, load_format="dummy", dtype="float32", max_num_seqs=slots, max_num_batched_tokens=2048,
              enable_prefix_caching=False, kv_cache_memory_bytes=1 << 28, enforce_eager=True, seed=0, **more)
    draw = random.Random(0)
    lengths = [draw.randrange(16, 101) for _ in range(count)]
    prompts = [{"prompt_token_ids": [draw.randrange(2048) for _ in range(length)]} for length in lengths]
    limits = [SamplingParams(temperature=0.0, max_tokens=draw.randrange(8, 61), ignore_eos=True) for _ in range(count)]
    started = time.perf_counter()
    outputs = llm.generate(prompts, limits, use_tqdm=False)
    seconds = time.perf_counter() - started
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    import vllm
    print("RESULT " + json.dumps({"tokens": tokens, "seconds": seconds, "version": vllm.__version__}))

if __name__ == "__main__":
    main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, type=Path, metavar="FILE", help="the interpreter that has vLLM")
    parser.add_argument("--requests", type=int, default=60)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(folder / "model")
        (folder / "run.py").write_text(_RUN)
        plain = _run(args, folder, model, None)
        rows = [{"schedule": "vLLM's own", **_rate(plain)}]
        for batch, steps in CADENCES:
            found = _run(args, folder, model, (batch, steps))
            differing = sum(one != other for one, other in zip(found["tokens"], plain["tokens"], strict=True))
            trace = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
            checked = _cadence(trace, batch, steps)
            rows.append(
                {"schedule": f"rra, B_E {batch}, N_D {steps}", **_rate(found), "differing": differing, **checked}
            )
    columns = tuple(dict.fromkeys(name for row in rows for name in row))
    print(table(columns, [[str(row.get(name, "")) for name in columns] for row in rows]))
    failed = any(row.get("differing") or row.get("not the cadence") for row in rows)
    print(
        f"\nrecord: {write_record('vllm-plugin', {'vllm': plain['version'], 'requests': args.requests, 'rows': rows})}"
    )
    if failed:
        raise SystemExit(1)


def _run(args: argparse.Namespace, folder: Path, model: Path, cadence: tuple[int, int] | None) -> dict[str, Any]:
    """Tokens and seconds of one engine."""
    plan, trace = folder / "plan.yaml", folder / "trace.jsonl"
    trace.unlink(missing_ok=True)
    batch, steps = cadence or (1, 1)
    schedule = f"{{policy: rra, prefill_batch: {batch}, decode_steps: {steps}, decode_batch: {SLOTS}}}"
    plan.write_text(f"model: demo\nschedule: {schedule}\nplacement: [{{devices: [0], layers: [0, 6]}}]\n")
    known = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = {
        **known,
        "PYTHONPATH": str(Path(exeplan.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "EXEPLAN_PLAN": str(plan),
        "EXEPLAN_TRACE": str(trace),
    }
    scheduler = "exeplan.vllm_plugin.scheduler.RraSyncScheduler" if cadence else ""
    words = [str(args.python), str(folder / "run.py"), str(model), scheduler, str(args.requests), str(SLOTS)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"vLLM did not run: {(done.stderr or done.stdout)[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def _rate(found: dict[str, Any]) -> dict[str, Any]:
    tokens = sum(map(len, found["tokens"]))
    return {"tokens": tokens, "tokens/s": round(tokens / found["seconds"], 1)}


def _cadence(trace: list[dict[str, Any]], batch: int, steps: int) -> dict[str, Any]:
    """How large prefills were and how many decodes lay between them; and which were not as the plan says."""
    prefills = [row for row in trace if row["pass"] == "prefill"]
    runs = [(kind, len(list(group))) for kind, group in groupby(row["pass"] for row in trace)]
    between = [length for kind, length in runs[1:-1] if kind == "decode"]
    # A prefill is smaller where fewer wait or fewer slots are free.
    small = [row for row in prefills if row["num_seqs"] < batch and row["waiting"] and row["running"] < SLOTS]
    short = [length for length in between if length < steps]
    return {
        "prefills": dict(sorted(Counter(row["num_seqs"] for row in prefills).items())),
        "decodes between": dict(sorted(Counter(between).items())),
        "not the cadence": len(small) + len(short) + sum(row["num_seqs"] > batch for row in prefills),
    }


if __name__ == "__main__":
    main()
