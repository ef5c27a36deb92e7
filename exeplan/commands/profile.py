"""time single layers of a model on this device

MODEL is a Hugging Face model directory or a shipped name (plans/models). An interrupted run resumes from its file.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--budget", default="60s", metavar="TIME", help="stop measuring after this long (default 60s)")
    parser.add_argument(
        "--target-error", type=float, default=0.03, metavar="SHARE", help="stop at this interpolation error"
    )
    parser.add_argument(
        "--weights", choices=("auto", "dummy"), default="auto", help="dummy: random weights, as timing needs no others"
    )
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto (default)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="compute threads on a CPU (default 1)")
    parser.add_argument("--max-num-seqs", type=int, metavar="N", help="largest decode batch to measure")
    parser.add_argument("--max-context", type=int, metavar="N", help="longest context to measure")


def run(args: argparse.Namespace) -> int:
    from exeplan.errors import InputError
    from exeplan.model import load_model_spec
    from exeplan.units import seconds

    if not 0 < args.target_error < 1:
        raise InputError(f"--target-error must lie between 0 and 1, found {args.target_error:g}")
    for name in ("threads", "max_num_seqs", "max_context"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, found {value}")
    spec, budget = load_model_spec(args.model), seconds(args.budget, "--budget")
    from exeplan.profiler.profile_model import profile_model  # Imports torch: seconds that a mistake need not wait.

    device = _device(args.device)
    profile_model(
        spec,
        dtype=args.dtype if args.dtype != "auto" else "bfloat16" if device == "cuda" else "float32",
        device=device,
        output=args.output,
        budget_seconds=budget,
        target_error=args.target_error,
        max_num_seqs=args.max_num_seqs,
        max_context=args.max_context,
        num_threads=args.threads,
    )
    return 0


def _device(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
