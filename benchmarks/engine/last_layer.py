"""What a pass with prompts saves where its last layer goes on with the last tokens alone: measured, and as predicted.

    python -m benchmarks.engine.last_layer [--model demo] [--profile FILE] [--budget 30s] [--turns 40]

Prompts of each batch are prefilled by turns as the engine does it, and with the last layer computing every token, as a
profiler's probe has it; CPU seconds of one thread, medians. Predicted is the saving by a profile of the model, made at
the start unless one is given, whose measurements are of probed passes only. Writes records/last-layer.json.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from benchmarks.fidelity.bench_runs import profiled
from benchmarks.lib.record import write_record
from exeplan.core.batch import Batch, num_blocks_for
from exeplan.core.profile import load_profile
from exeplan.planner.reports.tables import table
from exeplan.profiler.measuring.probe import Probe
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.reference_passes import timed_sequence
from exeplan.simulator.cost import CostModel

BATCHES = ((1, 64), (1, 128), (4, 128), (16, 128), (2, 500))
"""Prompts, and tokens of each."""
WARM_TURNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--budget", default="30s", help="of the profile that is made")
    parser.add_argument("--turns", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        profile = load_profile(profiled(args.model, args.profile, Path(folder), "--budget", args.budget))
    saving, plain = CostModel(profile), CostModel(replace(profile, last_layer_saving=0.0))
    most = max(count * num_blocks_for(tokens) for count, tokens in BATCHES)
    runner = ModelRunner(profile.model, dtype=profile.dtype, num_blocks=most, dummy_weights=True)
    rows = []
    for count, tokens in BATCHES:
        batch = prompts(count, tokens)
        every, wanted = measured(runner, batch, args.turns)
        rows.append(
            {
                "prompts": count,
                "tokens": tokens,
                "every token ms": 1e3 * every,
                "as the engine ms": 1e3 * wanted,
                "saved": 1 - wanted / every,
                "predicted": 1 - saving.batch_seconds(batch) / plain.batch_seconds(batch),
            }
        )
    cells = [[f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    print(table(list(rows[0]), cells))
    print(f"\nrecord: {write_record('last-layer', {'model': profile.model.name, 'turns': args.turns, 'rows': rows})}")


def prompts(count: int, tokens: int) -> Batch:
    """A batch that prefills that many prompts of one length."""
    return Batch(prefill=tuple(timed_sequence(f"{n}", tokens, decodes=False, encodes=False) for n in range(count)))


def measured(runner: ModelRunner, batch: Batch, turns: int) -> tuple[float, float]:
    """Median CPU seconds with the last layer computing every token, and as the engine computes the batch."""
    model = runner.model
    found: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(turns + WARM_TURNS):
        for probed, kept in found.items():
            runner.model = Probe(model, runner.device) if probed else model
            seconds = timed(lambda: prefill(runner, batch))
            if turn >= WARM_TURNS:
                kept.append(seconds)
    runner.model = model
    return median(found[True]), median(found[False])


def prefill(runner: ModelRunner, batch: Batch) -> None:
    token_ids = {row.request_id: [n % runner.spec.vocab_size for n in range(row.num_tokens)] for row in batch.prefill}
    runner.forward(batch, token_ids)
    for request_id in token_ids:
        runner.free(request_id)


def timed(work: Callable[[], None]) -> float:
    """CPU seconds of this thread."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


if __name__ == "__main__":
    main()
