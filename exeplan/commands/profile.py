"""time single layers of a model on this device, derive the times from a datasheet, or import them

MODEL is a shipped name (plans/models), a Hugging Face model directory, or an id of the Hub that is in its cache. An
interrupted run resumes from its file. With --devices N also shards and links of N devices. With --datasheet nothing is
measured: a roofline of the device (plans/devices) gives the times.
`exeplan profile import FILE... --model MODEL --device NAME -o FILE` reads timings from other tools.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exeplan.core.models.model import ModelSpec
    from exeplan.core.profile import Profile
    from exeplan.profiler.datasheets.engine_constants import EngineConstants

POSITION = 10

_TARGET_ERROR = 0.03
_BUDGET, _THREADS = "60s", "1"
_MEASURING = ("budget", "target_error", "weights", "threads", "devices", "max_num_seqs", "max_context")
"""Options that only measuring on this device has."""
CORRECTED_EVENLY = "the correction by measured serving runs was found with even routing, and may count some of it twice"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("files", metavar="FILE", nargs="*", type=Path, help="with `import`: the timings")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16", "fp8"), default="auto")
    parser.add_argument("--kv-dtype", choices=("fp8", "bfloat16"), help="of keys and values (default: as --dtype)")
    parser.add_argument("--device", help="cpu, cuda, or auto (default); with `import` its name")
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument("--budget", metavar="TIME", help="stop measuring after this long (default 60s)")
    measuring.add_argument(
        "--target-error", type=float, metavar="SHARE", help="stop at this interpolation error (default 0.03)"
    )
    measuring.add_argument(
        "--weights", choices=("auto", "dummy"), help="dummy: random weights, which suffice for timing"
    )
    measuring.add_argument(
        "--threads",
        metavar="N",
        help="compute threads of a process on a CPU (default 1); several, such as 1,2, are profiled one after the "
        "other, and optimize takes the best",
    )
    measuring.add_argument(
        "--devices", type=int, metavar="N", help="shards, links and workers too, for plans on N devices"
    )
    measuring.add_argument("--max-num-seqs", type=int, metavar="N", help="largest decode batch to measure")
    measuring.add_argument("--max-context", type=int, metavar="N", help="longest context to measure")
    derived = parser.add_argument_group("from a datasheet, or imported")
    derived.add_argument("--datasheet", metavar="NAME", help="a shipped name (plans/devices) or a YAML file")
    derived.add_argument("--set", action="append", metavar="NAME=VALUE", help="override a constant of the datasheet")
    derived.add_argument("--cluster", metavar="NAME", help="take the links of this cluster (plans/clusters, YAML file)")
    derived.add_argument("--tensor-parallel-sizes", metavar="LIST", help="such as 1,2,4 (default: all there are to 8)")
    derived.add_argument("--model", dest="of_model", metavar="MODEL", help="the model that imported times are of")
    derived.add_argument("--format", choices=("auto", "csv", "vidur", "aiconfigurator"), help="of imported files")
    derived.add_argument("--overhead", metavar="TIME", help="host time of an iteration, where imported files have none")
    derived.add_argument(
        "--routing",
        metavar="R",
        help="of tokens to experts: even, or power_law_1.2 (default: even; imported: uneven)",
    )
    derived.add_argument("--engine", metavar="NAME", help="add a serving engine's own times (plans/engines, YAML file)")
    engine = parser.add_argument_group("on a serving engine that is installed here: --engine vllm, without --datasheet")
    engine.add_argument(
        "--engine-python",
        metavar="FILE",
        help="the interpreter that has the engine (default: the one that runs exeplan)",
    )


def run(args: argparse.Namespace) -> int:
    from exeplan.outputs import check_output

    check_output(args.output)
    if args.model == "import":
        _refuse(
            args,
            "datasheet",
            "set",
            "cluster",
            "kv_dtype",
            "engine_python",
            needed="a model and its datasheet, not with `profile import`",
        )
        _refuse(args, *_MEASURING, needed="measuring on this device, not with `profile import`")
        return _import(args)
    imported = "`exeplan profile import FILE... --model MODEL`"
    _refuse(args, "files", "of_model", "format", "overhead", needed=imported)
    if args.datasheet:
        _refuse(args, "engine_python", needed="--engine vllm without --datasheet: a datasheet needs no engine")
        _refuse(args, *_MEASURING, "device", needed="measuring on this device, not with --datasheet")
        return _derive(args)
    _refuse(args, "set", "cluster", "tensor_parallel_sizes", "routing", needed="--datasheet NAME")
    return _measure_engine(args) if args.engine else _measure(args)


def _refuse(args: argparse.Namespace, *names: str, needed: str) -> None:
    """Raises InputError for an option that has no meaning here."""
    from exeplan.errors import InputError

    spelled = {"files": "a second argument", "of_model": "--model"}
    for name in names:
        if getattr(args, name) not in (None, []):
            raise InputError(f"{spelled.get(name, '--' + name.replace('_', '-'))} goes with {needed}")


def _measure(args: argparse.Namespace) -> int:
    from exeplan.core.models.model import load_model_spec
    from exeplan.errors import InputError
    from exeplan.extras import require
    from exeplan.progress import note
    from exeplan.units import seconds_of_run

    require("measuring", "torch")
    _refuse(args, "engine_python", needed="--engine vllm")
    target = _TARGET_ERROR if args.target_error is None else args.target_error
    if not 0 < target < 1:
        raise InputError(f"--target-error must lie between 0 and 1, found {target:g}")
    _check_sizes(args)
    spec, budget = load_model_spec(args.model), seconds_of_run(args.budget or _BUDGET, "--budget")
    from exeplan.profiler.thread_counts import parse_threads, profile_thread_counts  # Imports torch: seconds.
    from exeplan.runner.compute.families import check_family

    check_family(spec)
    note(spec.remarks)
    device = _device(args.device)
    counts = parse_threads(args.threads or _THREADS)
    if device != "cpu" and len(counts) > 1:
        raise InputError(f"--threads {args.threads} is for CPUs; on a GPU a process has one")
    profile_thread_counts(
        spec,
        counts,
        dtype=args.dtype if args.dtype != "auto" else _usual_dtype(spec, device),
        kv_dtype=args.kv_dtype,
        device=device,
        output=args.output,
        budget_seconds=budget,
        target_error=target,
        max_num_seqs=args.max_num_seqs,
        max_context=args.max_context,
        num_devices=args.devices or 1,
        dummy_weights=args.weights == "dummy",
    )
    print(f"wrote {args.output}")
    return 0


def _measure_engine(args: argparse.Namespace) -> int:
    from exeplan.core.models.model import load_model_spec
    from exeplan.errors import InputError
    from exeplan.extras import require
    from exeplan.progress import note
    from exeplan.units import seconds_of_run

    require("measuring", "torch")
    _check_sizes(args)
    if args.target_error is not None:
        raise InputError(f"--target-error goes with exeplan's own engine; {args.engine} is timed for its --budget")
    if args.weights == "dummy":
        note([f"--weights dummy changes nothing: {args.engine} is timed with random weights always"])
    if args.kv_dtype or (args.devices or 1) > 1:
        raise InputError(f"--engine {args.engine} is measured on one device, keys and values in the weights' dtype")
    spec, budget = load_model_spec(args.model), seconds_of_run(args.budget or _BUDGET, "--budget")
    note(spec.remarks)
    from exeplan.profiler.thread_counts import parse_threads
    from exeplan.profiler.through_engine.profile_engine import profile_engine

    threads, *more = parse_threads(args.threads or _THREADS)
    if more:
        raise InputError(f"--engine {args.engine} is measured with one number of threads, found {args.threads}")
    device = _device(args.device)
    profile_engine(
        spec,
        args.engine,
        python=args.engine_python,
        dtype=args.dtype if args.dtype != "auto" else _usual_dtype(spec, device),
        device=device,
        output=args.output,
        budget_seconds=budget,
        max_num_seqs=args.max_num_seqs,
        max_context=args.max_context,
        num_threads=threads,
    )
    print(f"wrote {args.output}")
    return 0


def _check_sizes(args: argparse.Namespace) -> None:
    """Raises InputError for a number of things that is below one."""
    from exeplan.errors import InputError

    for name in ("devices", "max_num_seqs", "max_context"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, found {value}")


def _usual_dtype(spec: "ModelSpec", device: str) -> str:
    """Of a CPU float32, but for weights of 4 bits in groups, which only products in bfloat16 read as they are."""
    grouped = spec.quantization is not None and spec.quantization.bits == 4 and spec.quantization.group_size is not None
    return "bfloat16" if device == "cuda" or grouped else "float32"


def _device(name: str | None) -> str:
    """The device of this name; for none, or `auto`, the GPU where there is one."""
    if name is not None and name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _derive(args: argparse.Namespace) -> int:
    from exeplan import api
    from exeplan.progress import note

    spec = api.load_model(args.model)
    note(spec.datasheet_remarks)
    profile = api.datasheet_profile(
        spec,
        args.datasheet,
        cluster=args.cluster,
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        tensor_parallel_sizes=_sizes(args.tensor_parallel_sizes),
        constants=_overrides(args.set or ()),
        engine=args.engine,
        routing=args.routing or "even",
    )
    if profile.correction and profile.routing:
        note([CORRECTED_EVENLY])
    _write(profile, args.output)
    return 0


def _overrides(texts: Sequence[str]) -> dict[str, str]:
    from exeplan.errors import InputError

    changes: dict[str, str] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise InputError(f"--set needs NAME=VALUE, such as gemm_efficiency=0.6, found '{text}'")
        if name in changes:
            raise InputError(f"--set gives {name} twice, {changes[name]} and {value}")
        changes[name] = value
    return changes


def _sizes(text: str | None) -> tuple[int, ...] | None:
    from exeplan.errors import InputError

    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,3}", word, re.ASCII) for word in words):
        raise InputError(f"--tensor-parallel-sizes must be whole numbers such as 1,2,4, found '{text}'")
    return tuple(sorted({int(word) for word in words}))


def _import(args: argparse.Namespace) -> int:
    from exeplan.core.models.model import load_model_spec
    from exeplan.errors import InputError
    from exeplan.profiler.datasheets.engine_constants import load_engine, with_engine
    from exeplan.profiler.importing import import_profile
    from exeplan.progress import note
    from exeplan.units import seconds

    if not args.files:
        raise InputError("profile import needs at least one FILE of timings")
    if not args.of_model or args.device in (None, "auto"):
        raise InputError("profile import needs --model MODEL and --device NAME: what was timed, and where")
    sizes = _sizes(args.tensor_parallel_sizes)
    if args.engine and args.overhead:
        raise InputError("--engine says what the host takes; leave --overhead out")
    engine = load_engine(args.engine) if args.engine else None
    overhead = seconds(args.overhead, "--overhead") if args.overhead else None
    if overhead == inf:
        raise InputError("--overhead must be finite, found 'inf'")
    spec = load_model_spec(args.of_model)
    note(spec.remarks)
    profile, remarks = import_profile(
        args.files,
        spec=spec,
        device=args.device,
        format=args.format or "auto",
        overhead_seconds=overhead,
        dtype=args.dtype if args.dtype != "auto" else "bfloat16",
        routing=args.routing,
    )
    for remark in remarks:
        print(remark)
    profile = with_engine(_run_by(profile, engine), engine) if engine else profile
    _write(_only(profile, sizes) if sizes else profile, args.output)
    return 0


def _run_by(profile: "Profile", engine: "EngineConstants") -> "Profile":
    """Without the layouts of a mixture that the engine does not run."""
    from exeplan.profiler.datasheets.engine_constants import expert_shardings

    run = expert_shardings(engine, profile.model, profile.tensor_parallel_sizes)
    left = set(profile.expert_shardings) - set(run)
    return replace(profile, measurements=tuple(row for row in profile.measurements if row.sharding not in left))


def _only(profile: "Profile", sizes: Sequence[int]) -> "Profile":
    """Its rows at these tensor parallel sizes, and those that have none. Raises InputError when one is missing."""
    from exeplan.errors import InputError

    if absent := sorted(set(sizes) - set(profile.tensor_parallel_sizes)):
        there = ", ".join(map(str, profile.tensor_parallel_sizes))
        raise InputError(f"no rows of tensor parallel size {absent[0]} were imported; there are sizes {there}")
    of_any = ("overhead", "control", "send")
    rows = (m for m in profile.measurements if m.tensor_parallel_size in sizes or m.op in of_any)
    return replace(profile, measurements=tuple(rows))


def _write(profile: "Profile", output: Path) -> None:
    from exeplan.core.profile import save_profile

    save_profile(profile, output)
    sizes = ", ".join(map(str, profile.tensor_parallel_sizes))
    print(f"{profile.model.name} in {profile.dtype} on {profile.device.name}: {profile.source}")
    print(f"wrote {output}: {len(profile.measurements)} rows, tensor parallel sizes {sizes}")
