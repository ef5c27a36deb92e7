"""Exported command lines, given to the argument parsers of the engines themselves.

    python -m benchmarks.quality.exported [--vllm PYTHON] [--sglang PYTHON] [--lmdeploy PYTHON]
                                          [--vllm-router PYTHON] [--sglang-router PYTHON]

PYTHON is an interpreter that can import the engine: of an environment where it is installed (vLLM's build for CPUs has
the same options), or one that finds the unpacked wheel by PYTHONPATH. Routers are those in front of servers that only
prefill or only decode. Plans for every policy and layout are exported;
each command line that the exporter does not refuse is parsed by the engine: what it does not know, or takes to be of
another type, fails. Printed and recorded are the version, and for each plan whether it was parsed and the values that
the engine then has. Exit status 1 where one was not. Writes records/exported.json.
"""

import argparse
import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

from benchmarks.lib.record import write_record
from exeplan.core.bounds import Bound
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Estimate, Placement, Schedule, Stage
from exeplan.errors import InputError
from exeplan.export import load_exporter
from exeplan.planner.reports.tables import table

_ENGINES = {
    "vllm": """
from vllm import __version__
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

def parser():
    return make_arg_parser(FlexibleArgumentParser())
""",
    "sglang": """
import argparse
from sglang.srt.server_args import ServerArgs
from sglang.version import __version__

def parser():
    made = argparse.ArgumentParser()
    ServerArgs.add_cli_args(made)
    return made
""",
    "lmdeploy": """
from lmdeploy.cli.cli import CLI
from lmdeploy.cli.serve import SubCliServe
from lmdeploy.version import __version__

SubCliServe.add_parsers()

def parser():
    return CLI.parser
""",
    "vllm-router": """
import argparse
from vllm_router.router_args import RouterArgs
from vllm_router.version import __version__

def parser():
    made = argparse.ArgumentParser()
    RouterArgs.add_cli_args(made, use_router_prefix=False)
    return made
""",
    "sglang-router": """
import argparse
from sglang_router.router_args import RouterArgs
from sglang_router.version import __version__

def parser():
    made = argparse.ArgumentParser()
    RouterArgs.add_cli_args(made, use_router_prefix=False)
    return made
""",
}
"""How each engine makes its parser."""
_PARSE = """
import json, sys

found = []
for words in json.load(sys.stdin):
    try:
        parsed = vars(parser().parse_args(words))
        names = [word[2:].removeprefix("no-").replace("-", "_") for word in words if word.startswith("--")]
        found.append({name: str(parsed.get(name)) for name in names})
    except SystemExit:
        found.append(None)
print(json.dumps([__version__, found]))
"""
_BEFORE = {"lmdeploy": ("serve", "api_server")}
"""Words of the program that its parser takes too."""
_ROUTER = "-router"
_FIGURES = ("throughput", "token_throughput", "ttft", "tpot", "latency", "latency_p50", "latency_p99")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for engine in _ENGINES:
        parser.add_argument(f"--{engine}", metavar="PYTHON")
    args = vars(parser.parse_args())
    rows = [row for name, python in args.items() if python for row in parsed(name.replace("_", "-"), python)]
    shown = ("yes", "NO", "not exported")
    cells = [
        [r["engine"], r["version"], r["plan"], shown[(0 if r["values"] else 1) if not r["refused"] else 2]]
        for r in rows
    ]
    print(table(("engine", "version", "plan", "parsed"), cells))
    print(f"record: {write_record('exported', {'rows': rows})}")
    raise SystemExit(int(any(_outcome(row) == "NO" for row in rows)))


def _outcome(row: dict[str, Any]) -> str:
    return "not exported" if row["refused"] else "yes" if row["values"] else "NO"


def parsed(engine: str, python: str) -> Iterator[dict[str, Any]]:
    """A row for each plan, and kind of its servers: the values that the engine, or router, has, or why the plan is not
    exported to it."""
    exporter, refused, lines = load_exporter(engine.removesuffix(_ROUTER)), dict[str, str](), dict[str, list[str]]()
    for name, plan in plans():
        try:
            found = exporter.export(plan, load_model_spec(plan.model), model="organisation/name")
        except InputError as error:
            refused[name] = str(error)
            continue
        if engine.endswith(_ROUTER):
            if found.router:
                words = found.router.command([("prefill", "http://a:1", 2), ("decode", "http://b:1", None)])
                lines[name] = [*words[len(found.router.program) :]]
            continue
        for instance in found.instances:
            of = f"{name}, {instance.phase}" if instance.phase else name
            joined = instance.join.words(hosts="2", rank="1", leader="10.0.0.1") if instance.join else ()
            lines[of] = [*_BEFORE.get(engine, ()), *instance.options, *joined]
    done = subprocess.run(
        [python, "-c", _ENGINES[engine] + _PARSE],
        input=json.dumps([*lines.values()]),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{python} could not parse anything for {engine}: {done.stderr[-2000:]}")
    print(done.stderr[-2000:] if "error:" in done.stderr else "", end="")
    version, found = json.loads(done.stdout.splitlines()[-1])
    values = dict(zip(lines, found, strict=True))
    for name in {**values, **refused}:
        row = {"engine": engine, "version": version, "plan": name}
        yield {**row, "values": values.get(name), "refused": refused.get(name)}


_APART = Schedule("waa-c", {"decode_batch": 600, "prefill_batch": 12, "micro_batches": 3})
_ADJUSTED = {"decode_batch": 100, "prefill_batch": 4, "prefill_tokens": 9000, "adjust_percent": 10}


def _servers(num_prefill: int, prefill_size: int, num_decode: int, decode_size: int, layers: int = 32) -> Placement:
    """Servers that only prefill, and after them servers that only decode, of so many GPUs each."""
    sizes = [("prefill", prefill_size)] * num_prefill + [("decode", decode_size)] * num_decode
    firsts = accumulate((size for _, size in sizes), initial=0)
    return tuple(
        Stage(devices=tuple(range(first, first + size)), layers=(0, layers), phase=phase)
        for first, (phase, size) in zip(firsts, sizes, strict=False)
    )


def plans() -> Iterator[tuple[str, Plan]]:
    """By what is particular about each."""
    stage = Stage(devices=tuple(range(8)), layers=(0, 80))
    chunked = Schedule("chunked", {"max_num_seqs": 256, "max_num_batched_tokens": 2048})
    figures: dict[str, Any] = dict.fromkeys(_FIGURES, 10.0)
    base = Plan(
        model="llama-3.1-70b",
        schedule=chunked,
        placement=(stage,),
        cluster="h100",
        dtype="bfloat16",
        device="cuda",
        kv_cache_tokens=100_000,
        bound=Bound(seconds=20.0),
        estimate=Estimate(**figures, kv_tokens=1e5, memory_bytes_per_gpu=7e10),
    )
    yield "chunked", base
    yield "orca", replace(base, schedule=Schedule("orca", {"max_num_seqs": 64}))
    yield "sglang", replace(base, schedule=Schedule("sglang", {**chunked.variables, "conservativeness_percent": 80}))
    rra: dict[str, Any] = {"prefill_batch": 8, "decode_steps": 24, "decode_batch": 120}
    yield "rra", replace(base, schedule=Schedule("rra", rra))
    halves = (Stage(devices=(0, 1, 2, 3), layers=(0, 41)), Stage(devices=(4, 5, 6, 7), layers=(41, 80)))
    yield "two stages", replace(base, placement=halves)
    hosts = (Stage(devices=tuple(range(8)), layers=(0, 40)), Stage(devices=tuple(range(8, 16)), layers=(40, 80)))
    yield "two hosts", replace(base, placement=hosts, replicas=(0, 16))
    yield "two replicas", replace(base, placement=(replace(stage, devices=(0, 1, 2, 3)),), replicas=(0, 4))
    yield "fp8", replace(base, dtype="fp8")
    yield "a cache in fp8", replace(base, kv_dtype="fp8")
    sparse = replace(base, model="qwen3-235b-a22b", dtype="fp8")
    layers = (0, load_model_spec(sparse.model).num_layers)
    yield "experts divided", replace(sparse, placement=(replace(stage, layers=layers, expert_parallel_size=8),))
    ranks = replace(stage, layers=layers, data_parallel_size=4, expert_parallel_size=8)
    yield "ranks", replace(sparse, placement=(ranks,))
    yield "2P3D", replace(base, model="llama-3.1-8b", schedule=_APART, placement=_servers(2, 1, 3, 1))
    yield (
        "1P1D on two hosts",
        replace(base, schedule=Schedule("waa-c", _ADJUSTED), placement=_servers(1, 8, 1, 8, layers=80)),
    )
    one = Stage(layers=(0, load_model_spec("demo").num_layers))
    yield "a CPU", replace(base, model="demo", placement=(one,), cluster=None, dtype="float32", device="cpu")


if __name__ == "__main__":
    main()
