"""How well the sum of parts predicts whole steps of the engine: random batches, run and predicted.

    python -m exeplan.profiler.measuring.check PROFILE [CASES]

Each case is a batch of random size with prompts of random lengths, prefilled and then decoded by the whole engine; in
half of the cases more requests join while others decode. Not here: schedules (`exeplan bench`).
"""

import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from exeplan.core.batch import Batch, SequenceState, num_blocks_for
from exeplan.core.profile import Profile, load_profile
from exeplan.core.schedule import Schedule
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine.engine import Engine, Request
from exeplan.runner.engine.executor import InProcessExecutor
from exeplan.runner.engine.tokenizer import Tokenizer
from exeplan.simulator.cost import CostModel

_STEPS = 8
_MAX_TOKENS = 12_000
_MAX_WALL_OVER_CPU = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One engine step: its rows, and its seconds as predicted and as measured."""

    kind: str
    """`prefill`, `decode` or `mixed`."""
    num_prefill: int
    num_decode: int
    tokens: int
    """New prompt tokens and context tokens."""
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Positive where the prediction is too long."""
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests that start together, and those that join them after some steps."""

    prompts: tuple[int, ...]
    joining: tuple[int, ...]


def random_cases(profile: Profile, count: int, *, seed: int = 0) -> list[Case]:
    """Batches over the whole range of the profile: sizes and lengths log-uniform, lengths ragged within a batch."""
    draw = random.Random(seed)
    most = max(m.num_seqs for m in profile.measurements if m.op == "attention")
    longest = profile.model.max_context - 2 * _STEPS
    cases = []
    for index in range(count):
        num_seqs = round(most ** draw.random())
        typical = min(longest, _MAX_TOKENS // num_seqs) ** draw.uniform(0.4, 1.0)
        lengths = [max(1, min(longest, round(typical * draw.uniform(0.3, 1.0)))) for _ in range(num_seqs + 3)]
        joining = lengths[num_seqs : num_seqs + draw.randint(1, 3)] if index % 2 and num_seqs > 3 else []
        cases.append(Case(prompts=tuple(lengths[:num_seqs]), joining=tuple(joining)))
    return cases


def check_steps(profile: Profile, cases: Iterable[Case], *, dummy_weights: bool = True, rounds: int = 3) -> list[Step]:
    """The steps of every case in the whole engine: medians over rounds, wall seconds, disturbed steps left out."""
    cases = list(cases)
    blocks = max(sum(num_blocks_for(n + 2 * _STEPS) for n in (*c.prompts, *c.joining)) for c in cases)
    runner = ModelRunner(
        profile.model,
        dtype=profile.dtype,
        kv_dtype=profile.kv_dtype,
        device=profile.device.kind,
        num_blocks=blocks,
        dummy_weights=dummy_weights,
    )
    cost = CostModel(profile)
    found: dict[tuple[int, str, int, int], list[Step]] = defaultdict(list)
    for seed in range(rounds):
        for index, case in enumerate(cases):
            for step in _run(runner, case, cost, seed):
                found[index, step.kind, step.num_prefill, step.num_decode].append(step)
    return [_median(steps) for steps in found.values()]


def _median(steps: list[Step]) -> Step:
    return sorted(steps, key=lambda step: step.measured)[len(steps) // 2]


def _run(runner: ModelRunner, case: Case, cost: CostModel, seed: int) -> Iterator[Step]:
    """One case through the engine, undisturbed steps only."""
    slots = len(case.prompts) + len(case.joining)
    engine = Engine(
        InProcessExecutor(runner),
        Schedule("orca", {"max_num_seqs": slots}),
        tokenizer=Tokenizer.load(runner.spec),
        num_blocks=runner.cache.num_blocks,
    )
    draw = random.Random(seed)
    running: list[SequenceState] = []
    arrivals = {0: case.prompts, _STEPS // 2: case.joining}
    for number in range(_STEPS):
        new = [_sequence(f"{number}-{index}", length) for index, length in enumerate(arrivals.get(number, ()))]
        for sequence in new:
            prompt = [draw.randrange(runner.spec.vocab_size) for _ in range(sequence.num_prompt_tokens)]
            sampling = SamplingParams(temperature=0.0, max_tokens=2 * _STEPS, ignore_eos=True)
            engine.add(Request(request_id=sequence.request_id, prompt_token_ids=prompt, sampling=sampling))
        batch = Batch(prefill=tuple(new), decode=tuple(running))
        predicted = cost.batch_seconds(batch)
        kind = "decode" if not new else "mixed" if running else "prefill"
        tokens = sum(s.num_tokens for s in (*new, *running))
        cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
        engine.step()
        wall, cpu = time.perf_counter_ns() - wall, time.thread_time_ns() - cpu
        running += new
        for sequence in running:
            sequence.num_output_tokens += 1
        if runner.device.type == "cuda" or torch.get_num_threads() > 1 or wall <= _MAX_WALL_OVER_CPU * cpu:
            yield Step(
                kind=kind,
                num_prefill=len(new),
                num_decode=len(batch.decode),
                tokens=tokens,
                predicted=predicted,
                measured=wall * 1e-9,
            )
    for sequence in running:
        engine.abort(sequence.request_id)


def _sequence(request_id: str, num_prompt_tokens: int) -> SequenceState:
    return SequenceState(
        request_id=request_id, num_prompt_tokens=num_prompt_tokens, max_output_tokens=2 * _STEPS, num_blocks=1
    )


def table(steps: Iterable[Step]) -> str:
    """Errors by kind of step: how many, the median with its sign, and the median, 90th percentile and largest size."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        by_kind[step.kind].append(step.error)
        by_kind["all"].append(step.error)
    lines = [f"{'steps':10}{'number':>8}{'bias':>9}{'median':>9}{'p90':>9}{'max':>9}"]
    for kind, errors in sorted(by_kind.items()):
        sizes = np.abs(errors)
        lines.append(
            f"{kind:10}{len(errors):8}{statistics.median(errors):9.1%}{np.median(sizes):9.1%}"
            f"{np.quantile(sizes, 0.9):9.1%}{sizes.max():9.1%}"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    profile = load_profile(Path(arguments[0]))
    torch.set_num_threads(profile.device.num_threads)
    steps = check_steps(profile, random_cases(profile, int(arguments[1]) if len(arguments) > 1 else 24))
    for step in sorted(steps, key=lambda step: -abs(step.error))[:8]:
        print(
            f"{step.kind}: {step.num_prefill} prompts, {step.num_decode} rows, {step.tokens} tokens: "
            f"{step.predicted * 1e3:.2f} ms predicted, {step.measured * 1e3:.2f} ms measured, {step.error:+.1%}"
        )
    print(table(steps))


if __name__ == "__main__":
    main(sys.argv[1:])
