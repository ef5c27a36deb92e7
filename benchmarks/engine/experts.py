"""Experts of a layer on one core: tokens sorted by expert against a loop over experts with masks, CPU seconds a pass.

    python -m benchmarks.engine.experts

Three ways over the same packed weights and the same routes, on one thread, in turns by round; the figure is the median
of the rounds in CPU seconds of this thread, and the ratios are to the first.

    sorted         the engine's: a gather and a product a touched expert, then one weighted sum
    touched masks  a loop over the experts that a token goes to, which finds the tokens of each by a mask
    all masks      the same over all experts, as the plain loop does

Writes records/experts.json.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.lib.record import write_record
from exeplan.kernels.products.linear import Linear
from exeplan.kernels.select import REFERENCE
from exeplan.runner.compute.blocks.experts import Experts, Router, Routing
from exeplan.runner.compute.blocks.layers import MLP

SHAPES = {"few wide": (8, 2, 512, 768), "middle": (32, 4, 512, 256), "many narrow": (128, 8, 512, 192)}
"""Experts, of a token, hidden size and width: Mixtral's and Qwen3's proportions."""
TOKENS = (1, 4, 16, 64, 256, 1024)
ROUNDS = 15


def mixture(num_experts: int, per_token: int, hidden: int, width: int) -> Experts:
    generator = torch.Generator().manual_seed(0)

    def product(outputs: int, inputs: int) -> Linear:
        return Linear(torch.randn(outputs, inputs, generator=generator) * inputs**-0.5)

    activation = partial(REFERENCE.gated_activation, kind="silu")
    experts = [MLP(product(2 * width, hidden), product(hidden, width), activation) for _ in range(num_experts)]
    return Experts(
        Router(product(num_experts, hidden), Routing(per_token=per_token, normalized=True)), experts, padded=True
    )


def with_masks(block: Experts, x_NE: Tensor, *, skip: bool) -> Tensor:
    """A loop over the experts; `skip` leaves out those to which no token goes."""
    weight_Nk, expert_Nk = block.router(x_NE)
    out_NE = torch.zeros_like(x_NE)
    for number, expert in enumerate(block.experts):
        token_R, place_R = torch.where(expert_Nk == number)
        if len(token_R) or not skip:
            out_NE.index_add_(0, token_R, expert(x_NE[token_R]) * weight_Nk[token_R, place_R, None])
    return out_NE


def median_seconds(ways: dict[str, Callable[[Tensor], Tensor]], x_NE: Tensor, rounds: int) -> dict[str, float]:
    """CPU seconds of this thread, the ways in turns; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            began = time.thread_time()
            way(x_NE)
            seconds[name].append(time.thread_time() - began)
    return {name: statistics.median(found[1:]) for name, found in seconds.items()}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    cases = []
    print(f"{'experts':12} {'tokens':>6} {'sorted ms':>10} {'touched masks':>14} {'all masks':>10}")
    for name, shape in SHAPES.items():
        block = mixture(*shape)
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            "sorted": block,
            "touched masks": partial(with_masks, block, skip=True),
            "all masks": partial(with_masks, block, skip=False),
        }
        for tokens in TOKENS:
            x_NE = torch.randn(tokens, shape[2], generator=torch.Generator().manual_seed(tokens))
            torch.testing.assert_close(block(x_NE), with_masks(block, x_NE, skip=True), rtol=1e-3, atol=1e-4)
            found = median_seconds(ways, x_NE, rounds)
            touched, every = (found[way] / found["sorted"] for way in ("touched masks", "all masks"))
            print(f"{name:12} {tokens:6d} {found['sorted'] * 1e3:10.3f} {touched:13.2f}x {every:9.2f}x", flush=True)
            cases.append({"experts": name, "tokens": tokens, "median_seconds": found})
    shapes = {
        name: dict(zip(("experts", "per_token", "hidden", "width"), s, strict=True)) for name, s in SHAPES.items()
    }
    print(f"record: {write_record('experts', {'shapes': shapes, 'rounds': rounds, 'cases': cases})}")


if __name__ == "__main__":
    main()
