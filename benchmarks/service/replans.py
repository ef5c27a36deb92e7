"""Plans adopted one after another under load: answers lost, doubled or changed, and how long tokens wait.

    python -m benchmarks.service.replans [--replans 20] [--clients 8]

Runs the demo model with random weights in an engine process as `exeplan serve` does, on one device and on two: plans of
RRA with other batches and frequencies, ORCA, chunked and static ones, WAA with other batches, and switches between all
of them, which move layers from worker to worker. Clients send consecutive greedy requests; the answers must be those
of an engine that keeps its plan. Prints for each re-plan the pause without new batches, the seconds from the order to
the switch, the requests with migrated keys and values, the recomputed requests, and the longest gap between two tokens
of a running answer. Writes records/replans.json.
"""

import argparse
import asyncio
import itertools
import random
import time
from collections import Counter
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.lib.record import write_record
from exeplan.core.models.model import ModelSpec, load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Placement, Schedule, Stage
from exeplan.planner.reports.tables import table
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine_process.build import engine_setup
from exeplan.runner.engine_process.client import EngineClient
from exeplan.runner.ipc.messages import EngineSetup, Prompt, Sampling

KV_TOKENS = 16384
LAYERS = 6
ONE: Placement = (Stage(layers=(0, LAYERS)),)
PIPELINE: Placement = (Stage(layers=(0, 3)), Stage(devices=(1,), layers=(3, LAYERS)))
TENSOR: Placement = (Stage(devices=(0, 1), layers=(0, LAYERS)),)
APART: Placement = (Stage(layers=(0, LAYERS), phase="prefill"), Stage(devices=(1,), layers=(0, LAYERS), phase="decode"))
TURNED: Placement = (
    Stage(devices=(1,), layers=(0, LAYERS), phase="prefill"),
    Stage(layers=(0, LAYERS), phase="decode"),
)
PLANS: list[tuple[Placement, Schedule]] = [
    (PIPELINE, Schedule("rra", {"prefill_batch": 4, "decode_steps": 16, "micro_batches": 2})),
    (PIPELINE, Schedule("rra", {"prefill_batch": 8, "decode_steps": 6, "micro_batches": 2})),
    (PIPELINE, Schedule("orca", {"max_num_seqs": 8, "micro_batches": 2})),
    (PIPELINE, Schedule("rra", {"prefill_batch": 2, "decode_steps": 30, "micro_batches": 1})),
    (APART, Schedule("waa-c", {"decode_batch": 8, "prefill_batch": 2})),
    (APART, Schedule("waa-m", {"decode_batch": 6, "prefill_batch": 1, "micro_batches": 2})),
    (TURNED, Schedule("waa-c", {"decode_batch": 5, "prefill_batch": 3})),
    (PIPELINE, Schedule("chunked", {"max_num_seqs": 8, "max_num_batched_tokens": 64, "micro_batches": 2})),
    (TENSOR, Schedule("rra", {"prefill_batch": 4, "decode_steps": 10})),
    (ONE, Schedule("static", {"batch_size": 6})),
    (ONE, Schedule("rra", {"prefill_batch": 5, "decode_steps": 12})),
]
REQUESTS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replans", type=int, default=20)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two re-plans, on average")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    figures = asyncio.run(_run(args))
    rows = [
        (
            row["to"],
            f"{row['paused_s']:.3f}",
            f"{row['took_s']:.2f}",
            str(row["carried"]),
            str(row["recomputed"]),
            f"{row['gap_s']:.2f}",
        )
        for row in figures["replans"]
    ]
    print(table(("to", "paused s", "took s", "carried", "computed again", "longest gap s"), rows))
    print()
    print(table(("", ""), [[name, str(value)] for name, value in figures.items() if name != "replans"]))
    print(f"\nrecord: {write_record('replans', figures)}")
    good = figures["answers"].get("as undisturbed", 0)
    assert good == sum(figures["answers"].values()), figures["answers"]


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    spec = load_model_spec("demo")
    draw = random.Random(args.seed)
    bodies = [
        ([draw.randrange(100, spec.vocab_size) for _ in range(draw.randint(4, 120))], draw.randint(10, 120))
        for _ in range(REQUESTS)
    ]
    client = await EngineClient.start(_setup(spec, *PLANS[2]))
    try:
        wanted = [await _answer(client, body, Gaps()) for body in bodies]
        answers: Counter[str] = Counter()
        gaps = Gaps()
        stop = asyncio.Event()

        async def ask(number: int) -> None:
            for index in itertools.count(number, args.clients):
                if stop.is_set():
                    return
                found = await _answer(client, bodies[index % REQUESTS], gaps)
                answers["as undisturbed" if found == wanted[index % REQUESTS] else f"not so: {found[-1:]}"] += 1

        asking = [asyncio.create_task(ask(number)) for number in range(args.clients)]
        replans = []
        plans = itertools.cycle(PLANS)
        for _ in range(args.replans):
            await asyncio.sleep(draw.uniform(0.5, 1.5) * args.pause)
            replans.append(await _replan(client, _setup(spec, *(plan := next(plans))), str(plan[1]), gaps))
        await asyncio.sleep(args.pause)
        stop.set()
        await asyncio.gather(*asking)
        stats = client.stats
        return {
            "replans": replans,
            "answers": dict(answers),
            "paused, median s": round(median(row["paused_s"] for row in replans), 4),
            "paused, most s": max(row["paused_s"] for row in replans),
            "longest gap s": max(row["gap_s"] for row in replans),
            "blocks given back": stats.free_blocks == stats.num_blocks,
        }
    finally:
        await client.close()


class Gaps:
    """Times between two tokens of one answer, also of those whose next one has not come yet."""

    def __init__(self) -> None:
        self._ended: list[tuple[float, float]] = []
        self._last: dict[int, float] = {}

    def token(self, answer: int, now: float, *, last: bool) -> None:
        if answer in self._last:
            self._ended.append((self._last[answer], now))
        self._last[answer] = now
        if last:
            del self._last[answer]

    def longest(self, began: float, now: float) -> float:
        """Of those that ended after `began`, or last until `now`; 0 where there is none."""
        ended = [end - begin for begin, end in self._ended if end >= began]
        return max([*ended, *(now - begin for begin in self._last.values())], default=0.0)


def _setup(spec: ModelSpec, placement: Placement, schedule: Schedule) -> EngineSetup:
    plan = Plan(model="demo", schedule=schedule, placement=placement, kv_cache_tokens=KV_TOKENS)
    return engine_setup(plan, spec, dummy_weights=True)


async def _replan(client: EngineClient, setup: EngineSetup, name: str, gaps: Gaps) -> dict[str, Any]:
    began = time.perf_counter()
    switched = await client.switch_plan(setup)
    took = time.perf_counter() - began
    await asyncio.sleep(0.5)  # Interrupted requests have had a token again.
    return {
        "to": name,
        "stages": len(setup.placement),
        "paused_s": round(switched.seconds, 4),
        "took_s": round(took, 3),
        "carried": switched.num_carried,
        "recomputed": switched.num_recomputed,
        "gap_s": round(gaps.longest(began, time.perf_counter()), 3),
    }


async def _answer(client: EngineClient, body: tuple[list[int], int], gaps: Gaps) -> list[int]:
    """Tokens of one request, counted on arrival, so that surplus tokens are detected."""
    prompt, count = body
    job = client.reserve(1)
    sampling = Sampling(**asdict(SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)))
    client.submit(job, [Prompt(prompt_token_ids=prompt, sampling=sampling)])
    tokens: list[int] = []
    while True:
        for event in await job.next_events():
            gaps.token(id(job), time.perf_counter(), last=bool(event.finish_reason))
            tokens += event.token_ids
            if event.finish_reason:
                client.release(job)
                return tokens


if __name__ == "__main__":
    main()
