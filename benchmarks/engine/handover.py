"""WAA's handover on two CPU workers: from a prefill's end until its KV is there, rows that decode, CPU seconds.

    python -m benchmarks.engine.handover [--rounds 3]

The demo model with random weights, waa-c with one worker that prefills and one that decodes, all requests at once: 80
of 200 to 600 tokens in and 6 to 18 out, and 400 of 4 to 40 in and 10 to 60 out, one a prefill. The time is from the
report of a prefill to that of its handover, as the engine learns of them; rows are those of a decode pass, over the
middle half of the passes; CPU seconds are those of the engine's process and its workers from the first request to the
last token. Writes nothing.
"""

import argparse
import contextlib
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exeplan.core.batch import Batch
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, Stage
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.distributed.multiprocess_executor import MultiprocessExecutor
from exeplan.runner.engine.engine import Engine, Request
from exeplan.runner.engine.executor import BatchDone, KVArrived
from exeplan.runner.engine_process.build import build_executor, engine_setup

TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for _ in range(args.rounds):
        for case in CASES:
            print(measured(case), flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests, and the schedule that serves them."""

    num_requests: int
    inputs: tuple[int, int]
    outputs: tuple[int, int]
    prefill_batch: int
    decode_batch: int


CASES = (
    Case(num_requests=80, inputs=(200, 600), outputs=(6, 18), prefill_batch=4, decode_batch=32),
    Case(num_requests=400, inputs=(4, 40), outputs=(10, 60), prefill_batch=1, decode_batch=72),
)


def measured(case: Case) -> str:
    """One run, as a line."""
    spec = load_model_spec("demo")
    layers = (0, spec.num_layers)
    placement = tuple(Stage(devices=(n,), layers=layers, phase=phase) for n, phase in enumerate(("prefill", "decode")))
    schedule = Schedule("waa-c", {"decode_batch": case.decode_batch, "prefill_batch": case.prefill_batch})
    plan = Plan(model="demo", schedule=schedule, placement=placement, kv_cache_tokens=80 * 640)
    with contextlib.closing(build_executor(engine_setup(plan, spec, dummy_weights=True))) as executor:
        assert isinstance(executor, MultiprocessExecutor)
        waits = Waits(executor)
        engine = Engine(executor, schedule, num_blocks=80 * 40)
        pids = (os.getpid(), *executor.pids)
        before, start = cpu_seconds(pids), time.perf_counter()
        run(engine, case)
        seconds = time.perf_counter() - start
        spent = [round(after - at, 2) for at, after in zip(before, cpu_seconds(pids), strict=True)]
    tail = statistics.quantiles(waits.seconds, n=10)[-1]
    waited = f"handover {1e3 * statistics.median(waits.seconds):.1f} ms in the median, {1e3 * tail:.1f} at p90"
    held = waits.rows[len(waits.rows) // 4 : 3 * len(waits.rows) // 4]
    waited += f"; {statistics.mean(held):.1f} of {case.decode_batch} rows"
    return f"{waited}; CPU seconds {sum(spent):.2f} (engine, prefill, decode: {spent}), wall {seconds:.2f} s"


def run(engine: Engine, case: Case) -> None:
    """To the last token."""
    rng = random.Random(0)
    for number in range(case.num_requests):
        sampling = SamplingParams(temperature=0.0, max_tokens=rng.randint(*case.outputs), ignore_eos=True)
        prompt = [rng.randrange(5, 2000) for _ in range(rng.randint(*case.inputs))]
        engine.add(Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling))
    while engine.has_work:
        engine.step()


class Waits:
    """Watches the reports of an executor."""

    def __init__(self, executor: MultiprocessExecutor) -> None:
        self.seconds: list[float] = []
        self.rows: list[int] = []
        self._ended: dict[int, float] = {}
        self._results = executor.results
        executor.results = self._watched  # type: ignore[method-assign] # to watch it

    def _watched(self) -> Sequence[BatchDone | KVArrived]:
        found = self._results()
        now = time.perf_counter()
        for result in found:
            batch: Batch = result.batch
            if isinstance(result, KVArrived):
                self.seconds.append(now - self._ended.pop(id(batch)))
            elif batch.phase == "prefill":
                self._ended[id(batch)] = now
            else:
                self.rows.append(len(batch.decode))
        return found


def cpu_seconds(pids: Sequence[int]) -> list[float]:
    """Of each process so far."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
    return [(int(one[11]) + int(one[12])) / TICKS for one in fields]


if __name__ == "__main__":
    main()
