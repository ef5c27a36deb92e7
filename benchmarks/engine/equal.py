"""ORCA's figure 9 on the CPU engine: the CPU time of a batch of equal requests, 32 tokens out, as no scheduler matters.

    python -m benchmarks.engine.equal [--rounds 9]

The demo model with random weights, one core, 32 and 128 tokens in, batches of 1 to 32 requests that start and end
together: the engine with the policies `orca` and `static`, and transformers' `generate` with its batched attention
(SDPA), which stands for FasterTransformer. All three by turns; medians over the rounds, CPU time. Their greedy tokens
must agree. Writes records/equal.json. Not here: the paper's devices (`benchmarks/paper/orca.py`).
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.lib.record import write_record
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, Stage
from exeplan.planner.reports.tables import table
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine.engine import Engine, Request
from exeplan.runner.engine_process.build import build_engine, engine_setup

PROMPTS, BATCHES, OUTPUTS = (32, 128), (1, 2, 4, 8, 16, 32), 32
SYSTEMS = ("orca", "static", "transformers")
Prompts = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        systems = made(Path(folder))
    found: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    for number in range(args.rounds + 1):
        for prompt in PROMPTS:
            for batch in BATCHES:
                prompts = [[(7 * i + 11 * n + 13 * number) % 2000 + 5 for i in range(prompt)] for n in range(batch)]
                timed = {name: seconds(run, prompts) for name, run in systems.items()}
                texts = [text for _, text in timed.values()]
                assert all(text == texts[0] for text in texts), "the same model gives the same tokens"
                if number:  # The first round warms up.
                    for name, (taken, _) in timed.items():
                        found[prompt, batch, name].append(taken)
    rows = [row(found, prompt, batch) for prompt in PROMPTS for batch in BATCHES]
    header = ("tokens in", "batch", *(f"{name} ms" for name in SYSTEMS), "orca over static", "orca over transformers")
    print(table(header, [[show(cell) for cell in line.values()] for line in rows]))
    print(f"record: {write_record('equal', {'rounds': args.rounds, 'rows': rows})}")


def row(found: dict[tuple[int, int, str], list[float]], prompt: int, batch: int) -> dict[str, Any]:
    times = {name: found[prompt, batch, name] for name in SYSTEMS}
    ratios = {
        f"over {other}": statistics.median(a / b for a, b in zip(times["orca"], times[other], strict=True))
        for other in SYSTEMS[1:]
    }
    middle = {name: 1e3 * statistics.median(taken) for name, taken in times.items()}
    return {"prompt": prompt, "batch": batch, **middle, **ratios}


def show(cell: float) -> str:
    return str(cell) if isinstance(cell, int) else f"{cell:.3g}"


def made(folder: Path) -> dict[str, Callable[[Prompts], Prompts]]:
    """From prompts to outputs, by system; all of one random model."""
    spec = load_model_spec("demo")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**spec.config, bos_token_id=None, eos_token_id=None, pad_token_id=0)).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)  # So that no two tokens are as likely.
    model.save_pretrained(folder)
    most = max(BATCHES)
    schedules = Schedule("orca", {"max_num_seqs": most}), Schedule("static", {"batch_size": most})
    systems: dict[str, Callable[[Prompts], Prompts]] = {
        schedule.policy: partial(answers, engine(folder, schedule)) for schedule in schedules
    }
    return {**systems, "transformers": lambda prompts: generated(model, prompts)}


def engine(folder: Path, schedule: Schedule) -> Engine:
    spec = load_model_spec(str(folder))
    tokens = max(BATCHES) * (max(PROMPTS) + OUTPUTS + 32)
    placement = (Stage(layers=(0, spec.num_layers)),)
    return build_engine(
        engine_setup(Plan(model=str(folder), schedule=schedule, placement=placement, kv_cache_tokens=tokens), spec)
    )


def answers(one: Engine, prompts: Prompts) -> Prompts:
    found: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    for number, ids in enumerate(prompts):
        sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUTS, ignore_eos=True)
        one.add(Request(request_id=str(number), prompt_token_ids=ids, sampling=sampling))
    while one.has_work:
        for output in one.step():
            found[output.request_id] += output.token_ids
    return list(found.values())


@torch.inference_mode()
def generated(model: LlamaForCausalLM, prompts: Prompts) -> Prompts:
    ids = torch.tensor(prompts)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUTS, do_sample=False)
    texts: Prompts = out[:, ids.shape[1] :].tolist()
    return texts


def seconds(run: Callable[[Prompts], Prompts], prompts: Prompts) -> tuple[float, Prompts]:
    """Of CPU, and the outputs."""
    began = time.process_time()
    found = run(prompts)
    return time.process_time() - began, found


if __name__ == "__main__":
    main()
