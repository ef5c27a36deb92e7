"""TCB's evaluation (ICPP 2022, figures 9 to 16) on this machine: naive, turbo and concatenated batches, slots, DAS.

    python -m benchmarks.tcb [--figures 9,10,11,12,13,14,15,16] [--model tcb-small] [--seconds 8] [--seeds 10]

The paper runs 3 + 3 layers of hidden size 3072 on a V100; on a CPU a smaller model stands in
(`plans/models/tcb-small.yaml`), float32, random weights. Figures 9 to 14 are computed by the engine; 15 is
simulated with measured batch times. The paper's figures have no printed values: ours are compared with the numbers in
its text. Writes records/tcb.json, or with some of the figures records/tcb-<figures>.json.
"""

import argparse
import time
from collections.abc import Sequence

import torch

from benchmarks.lib.record import write_record
from benchmarks.tcb.orders import Setting, compare, overhead, settings, with_batch_times
from benchmarks.tcb.serve import ROW_TOKENS, ROWS, best_of, from_backlogs, rising_rates
from benchmarks.tcb.slots import speed_ups
from exeplan.core.models.model import load_model_spec
from exeplan.planner.reports.tables import table
from exeplan.runner.compute.model_runner import ModelRunner

FIGURES = (9, 10, 11, 12, 13, 14, 15, 16)
BLOCKS = 8000
# Over naive and over turbo: utility in figure 9, throughput in the others.
PAPER_RATIOS = {9: (2.20, 1.29), 10: (2.22, 1.48), 11: (3.33, 1.52), 12: (None, 1.72)}
PAPER_SLOTS = {13: (10, 1.18), 14: (32, 2.31)}
PAPER_DAS_OVER_SJF, PAPER_DAS_SHARE = 1.4, 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figures", default=",".join(map(str, FIGURES)))
    parser.add_argument("--model", default="tcb-small")
    parser.add_argument("--seconds", type=float, default=8.0, help="of arrivals at each rate")
    parser.add_argument("--seeds", type=int, default=10, help="in figure 15")
    parser.add_argument("--repeats", type=int, default=3, help="in figures 13 and 14")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    wanted = sorted({int(word) for word in args.figures.split(",")} & set(FIGURES))
    torch.set_num_threads(args.threads)
    runner = ModelRunner(load_model_spec(args.model), num_blocks=BLOCKS, dummy_weights=True)
    begin, figures = time.perf_counter(), {}
    for number in wanted:
        if number not in figures:
            figures |= _figure(number, runner, args)
    part = "" if len(wanted) == len(FIGURES) else f"-{'-'.join(map(str, wanted))}"
    record = {"model": args.model, "threads": args.threads, "seconds": time.perf_counter() - begin, "figures": figures}
    print(f"\n{record['seconds']:.0f} s; record: {write_record(f'tcb{part}', record)}")


def _figure(number: int, runner: ModelRunner, args: argparse.Namespace) -> dict[int | str, object]:
    if number in (9, 10):
        rows = rising_rates(runner, "das", variance=20.0, seconds=args.seconds)
        shown = {9: _rates(9, rows, "utility"), 10: _rates(10, rows, "throughput")}
        return shown | {"backlog, das, variance 20": _backlog(runner, "das", 20.0, args.seconds)}
    if number in (11, 12):
        variance = 20.0 if number == 11 else 100.0
        rows = rising_rates(runner, "fcfs", variance=variance, seconds=args.seconds)
        shown = {number: _rates(number, rows, "throughput")}
        return shown | {f"backlog, fcfs, variance {variance:g}": _backlog(runner, "fcfs", variance, args.seconds)}
    if number in (13, 14):
        return {number: _slots(number, speed_ups(runner, rows=PAPER_SLOTS[number][0], repeats=args.repeats))}
    if number == 15:
        return {15: _orders([compare(setting, seeds=args.seeds) for setting in with_batch_times(runner, settings())])}
    setting = Setting(name="", rows=ROWS, row_tokens=ROW_TOKENS, variance=20.0)
    return {16: _overhead(overhead(with_batch_times(runner, [setting])[0], (0.25, 0.5, 1.0, 2.0)))}


def _rates(number: int, rows: list[dict], what: str) -> dict:
    """A line a rate, a column a system; under it the most of each, and concat over the two others."""
    order, variance = rows[0]["order"], rows[0]["variance"]
    names = list(dict.fromkeys(row["system"] for row in rows))
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    found = {(row["rate"], row["system"]): row[what] for row in rows}
    best = best_of(rows, what)
    lines = [[f"{rate:.0f}", *(f"{found[rate, name]:.1f}" for name in names)] for rate in rates]
    lines.append(["most", *(f"{best[name]:.1f}" for name in names)])
    unit = "utility a second" if what == "utility" else "requests/s"
    _head(number, f"{unit}, {order}, variance {variance:g}, batch size {ROWS}")
    print(table(("requests/s offered", *names), lines))
    ratios = {f"{ours} over {other}": best[ours] / best[other] for ours in ("concat", "slots") for other in names[:2]}
    for (what_over, ratio), paper in zip(ratios.items(), PAPER_RATIOS[number] * 2, strict=True):
        print(f"{what_over}: {ratio:.2f} x (the paper: {'not said' if paper is None else f'{paper} x'})")
    return {"rows": rows, "most": best, "ratios": ratios, "paper": PAPER_RATIOS[number]}


def _backlog(runner: ModelRunner, order: str, variance: float, seconds: float) -> dict:
    """Saturation as it is without deadlines; in CPU-seconds, which a busy machine hardly changes."""
    rates = from_backlogs(runner, order, variance=variance, seconds=seconds / 2)
    print(f"\nFrom a backlog, requests a CPU-second, {order}, variance {variance:g}:")
    lines = [
        [name, f"{rate:.1f}", f"{rate / rates['naive']:.2f}", f"{rate / rates['turbo']:.2f}"]
        for name, rate in rates.items()
    ]
    print(table(("", "requests/s", "over naive", "over turbo"), lines), flush=True)
    return rates


def _slots(number: int, rows: list[dict]) -> dict:
    batch, paper = PAPER_SLOTS[number]
    _head(number, f"speed-up of slots, batch size {batch}, rows of 400 tokens")
    lines = [
        [str(r["slots"]), f"{r['batch_seconds']:.2f}", f"{r['requests']:.0f}", f"{r['speed_up']:.2f}"] for r in rows
    ]
    print(table(("slots a row", "batch s", "requests", "speed-up"), lines))
    best = max(row["speed_up"] for row in rows)
    print(f"most: {best:.2f} x (the paper: {paper} x)")
    return {"rows": rows, "most": best, "paper": paper}


def _orders(rows: list[dict]) -> dict:
    _head(15, "utility of the orders, and the most that any schedule could earn")
    names = ("fcfs", "sjf", "edf", "das", "bound")
    ratios = ("das_over_best", "bound_over_best")
    lines = [[r["setting"], *(f"{r[n]:.1f}" for n in names), *(f"{r[n]:.2f}" for n in ratios)] for r in rows]
    print(table(("", *names, "das/best", "bound/best"), lines))
    print(f"the paper: das about {PAPER_DAS_OVER_SJF} x sjf, and more over the others")
    return {"rows": rows, "paper": PAPER_DAS_OVER_SJF}


def _overhead(rows: Sequence[dict]) -> dict:
    _head(16, f"DAS's own time, batch size {ROWS}, rows of {ROW_TOKENS} tokens")
    lines = [
        [f"{r['requests_per_second']:.0f}", str(r["waiting"]), f"{1e3 * r['das_seconds']:.2f}", f"{r['share']:.2%}"]
        for r in rows
    ]
    print(table(("requests/s offered", "waiting", "DAS ms", "of a batch"), lines))
    print(f"the paper: {PAPER_DAS_SHARE:.0%} at 400 requests/s")
    return {"rows": list(rows), "paper": PAPER_DAS_SHARE}


def _head(number: int, title: str) -> None:
    print(f"\nFigure {number}: {title}", flush=True)


if __name__ == "__main__":
    main()
