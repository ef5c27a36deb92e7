"""correct a profile's predictions by serving runs that were measured

FILE is a table of runs (CSV: engine, model, dtype, device, tensor_parallel_size, input_tokens, output_tokens,
concurrency, ttft_ms, tpot_ms; _s and _us are read too), a result of `vllm bench serve --save-result`, or guidellm's
report. What it does not say is taken from the profile. A few runs move the prediction as far as their number and the
runs of other deployments allow; the profile keeps by how much, from how many runs, and how sure that is.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exeplan.profiler.calibration.calibrate import Calibrated

POSITION = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", metavar="PROFILE", help="a profile of one model, made by `exeplan profile`")
    parser.add_argument("runs", metavar="FILE", nargs="+", type=Path, help="measured serving runs")
    parser.add_argument("-o", "--output", type=Path, metavar="PROFILE", help="write there (default: over PROFILE)")
    parser.add_argument("--engine", metavar="NAME", help="of runs that do not say it (default: the profile's)")
    parser.add_argument("--tensor-parallel-size", type=int, metavar="N", help="of runs that do not say it")


def run(args: argparse.Namespace) -> int:
    from exeplan.core.profile import load_profile, save_profile
    from exeplan.errors import InputError
    from exeplan.outputs import check_output
    from exeplan.profiler.calibration.calibrate import calibrate
    from exeplan.profiler.calibration.predict import OPTIONS
    from exeplan.profiler.calibration.read_runs import Defaults, read_runs
    from exeplan.progress import Shown

    output = args.output or Path(args.profile)
    check_output(output)
    profile = load_profile(Path(args.profile))
    if profile.more_threads:
        counts = ", ".join(map(str, profile.thread_counts))
        raise InputError(
            f"{args.profile} has several numbers of threads a process ({counts}); profile with the one that ran"
        )
    engine = args.engine or profile.source.partition(" with ")[2]
    sizes = profile.tensor_parallel_sizes
    if args.tensor_parallel_size is not None and args.tensor_parallel_size not in sizes:
        there = ", ".join(map(str, sizes))
        raise InputError(f"--tensor-parallel-size {args.tensor_parallel_size} is not in the profile, which has {there}")
    defaults = Defaults(
        engine=engine or "exeplan",
        engine_stated=bool(args.engine),
        model=profile.model.name,
        dtype=profile.dtype,
        device=profile.device.name,
        tensor_parallel_size=args.tensor_parallel_size or (sizes[0] if len(sizes) == 1 else None),
    )
    files = [read_runs(path, defaults) for path in args.runs]
    with Shown("calibrate") as shown:
        found = calibrate(profile, [run for file in files for run in file.runs], told=shown)
    if (name := found.runs[0][0].engine) not in OPTIONS:
        print(f"note: how {name} admits requests is not known here; its runs were replayed as vllm admits them")
    for remark in (remark for file in files for remark in file.remarks):
        print(f"note: {remark}")
    print(_table(found))
    print(f"\n{found.profile.correction.said if found.profile.correction else ''}")
    save_profile(found.profile, output)
    print(f"wrote {output}")
    return 0


def _table(found: "Calibrated") -> str:
    """Measured, predicted before, and predicted after; the last from runs that it has seen."""
    from exeplan.planner.reports.tables import table

    header = ("GPUs", "input", "output", "clients", "ttft ms", "before", "after", "tpot ms", "before", "after")
    rows = [
        (
            *map(str, (run.tensor_parallel_size, run.input_tokens, run.output_tokens, run.concurrency)),
            *(f"{1e3 * one.ttft:.1f}" for one in (run, before, after)),
            *(f"{1e3 * one.tpot:.2f}" for one in (run, before, after)),
        )
        for run, before, after in found.runs
    ]
    return table(header, rows)
