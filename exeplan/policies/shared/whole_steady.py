"""The steady state of passes of whole prompts under a limit on tokens: `chunked` of an encoder, `orca` with a limit.

Not here: how many prompts fit into a pass (`shared/whole_passes.py`).
"""

import numpy as np

from exeplan.policies.interface import Clock, Cycle, Steady
from exeplan.policies.shared.groups import resident_tokens, round_seconds
from exeplan.policies.shared.whole_passes import whole_passes
from exeplan.workload.workload import Workload


def whole_steady(steps: float, groups: int, slots: float, budget: float, workload: Workload, clock: Clock) -> Steady:
    """The passes of a group of `slots` and `budget` tokens a pass, and those that a resident request observes.

    Its own prefill is one pass, met by chance in proportion to the prompts of a pass.
    """
    own = whole_passes(workload.input_law, steps, slots, budget)
    seen = whole_passes(workload.input_law, steps, slots - 1, budget - 1) if slots > 1 else own
    alone = slots <= 1
    comb = workload.decode_law(first_token_from_prefill=clock.first_token_from_prefill).comb(1)
    per_row = comb.context[0] / comb.active[0] if comb.active[0] > 0 else 0.0
    shift = 1.0 if clock.first_token_from_prefill else 0.0
    rows = np.concatenate([own.rows, [1.0] if alone else seen.rows + 1])
    held, square = resident_tokens(workload)
    serving = own.completed * steps
    cycle = Cycle(
        num_prefill=np.concatenate([own.num_prompts, [0.0] if alone else seen.num_prompts]),
        num_decode=rows,
        context_tokens=rows * per_row,
        prompt_law=workload.input_law,
        prompt_tokens=np.concatenate([own.prompt_tokens, [0.0] if alone else seen.prompt_tokens]),
        kv_tokens=groups * serving * held,
        kv_tokens_std=float(np.sqrt(groups * (serving * max(square - held**2, 0.0) + (held * own.waiting_std) ** 2))),
        num_seqs=groups * serving,
    )
    seconds = clock.seconds(cycle)
    kinds, through = len(own.rows), seconds.sum(axis=0)
    round_ = round_seconds(seconds[:, :kinds, None], own.probability, groups)
    mean = float(own.probability @ through[:kinds])
    observed = float(through[-1] if alone else seen.probability @ through[kinds:])
    first = float((own.probability * own.num_prompts) @ through[:kinds]) / own.completed
    later = max(round_ + observed - mean, observed)
    return Steady(
        cycle=cycle,
        seconds=seconds,
        throughput=own.completed * groups / round_,
        latency=lambda output_tokens: first + (np.asarray(output_tokens, dtype=float) - shift) * later,
        admission_interval=round_ / groups,
    )
