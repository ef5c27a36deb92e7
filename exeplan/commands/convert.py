"""write a workload as a plain trace: CSV with input_tokens, output_tokens and arrival_s

FILE is what --workload takes anywhere. With --tokenizer texts, as in ShareGPT's file, are counted in the tokens of that
model instead of estimated; without a chat template and its special tokens.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exeplan.workload.traces import CountTokens
    from exeplan.workload.workload import Trace

POSITION = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", metavar="FILE", help="a trace in any format that is read")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="CSV")
    parser.add_argument("--tokenizer", metavar="MODEL", help="a model directory or an id of the Hugging Face Hub")


def run(args: argparse.Namespace) -> int:
    from exeplan.errors import InputError
    from exeplan.files import write_text
    from exeplan.workload.files import load_workload

    workload = load_workload(args.workload, _counter(args.tokenizer) if args.tokenizer else None)
    if workload.trace is None:
        raise InputError(f"'{args.workload}' is a law, which has no requests to write; a plan takes it as it is")
    write_text(args.output, _csv(workload.trace))
    print(f"{workload}\nwrote {args.output}")
    return 0


def _csv(trace: "Trace") -> str:
    columns = [trace.inputs.tolist(), trace.outputs.tolist()]
    header = "input_tokens,output_tokens"
    if trace.arrival_s is not None:
        columns, header = [*columns, [f"{time:.6f}" for time in trace.arrival_s.tolist()]], f"{header},arrival_s"
    rows = (",".join(map(str, row)) for row in zip(*columns, strict=True))
    return "\n".join([header, *rows, ""])


def _counter(model: str) -> "CountTokens":
    """Raises InputError for a model without a tokenizer."""
    from exeplan.core.models.model import load_model_spec
    from exeplan.errors import InputError
    from exeplan.extras import require
    from exeplan.runner.engine.tokenizer import Tokenizer

    require("counting tokens", "tokenizers", "jinja2")
    spec = load_model_spec(model)
    tokenizer = Tokenizer.load(spec) if spec.directory else None
    if tokenizer is None or tokenizer.codec is None:
        raise InputError(f"'{model}' has no tokenizer; name the directory or the Hub id of a model that has one")
    return lambda text: len(tokenizer.encode(text, special=False))
