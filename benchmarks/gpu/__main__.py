"""The GPU engine in one command, its time limited by `--minutes`: kernels, passes, peers, profiles and policies.

    python -m benchmarks.gpu [--sections kernels model ...] [--profiles FOLDER] [--output FILE] [--minutes 20]

Ceilings are measured first: a large copy and a large matrix product. Then follow each kernel as a share of them and
against torch; decode steps end to end and prefills against the roofline; throughput against transformers and vLLM on
the same GPU; profiles of the shipped shapes; and `static`, `orca`, `chunked` and `rra` on ExeGPT's tasks at four
bounds, predicted against measured. A section that fails is reported, the others run, and the exit status is 1. Needs no
network. With `--profiles` the profiles of Llama-3.1-8B, OPT-13B and T5-11B are kept in that folder.

Without a GPU the command prints that it needs one and ends. `--smoke` runs toy sizes on the CPU, with stand-ins for
CUDA graphs and kernels: it checks that the command works and measures nothing. Its figures are saved only with
`--output`.
"""

import argparse
import dataclasses
import gc
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu.setting import Clock, Section, Setting, give_back, measure_ceilings, setting_for
from benchmarks.lib.record import write_record

SECTIONS = {"kernels": 0.14, "model": 0.1, "peers": 0.18, "profiles": 0.2, "policies": 0.36}
"""With the share of the time that each may take."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--profiles", type=Path, metavar="FOLDER", help="keep the profiles of three models here")
    parser.add_argument("--output", type=Path, metavar="FILE", help="instead of benchmarks/records/gpu.json")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--smoke", action="store_true", help="toy sizes on the CPU: measures nothing")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        print("benchmarks.gpu: no CUDA GPU here, so there is nothing to measure; --smoke only tries whether it runs")
        return 2
    setting = setting_for(smoke=args.smoke)
    return _run(args, setting)


def _run(args: argparse.Namespace, setting: Setting) -> int:
    began = time.monotonic()
    gc.freeze()  # Each section gives memory back, and looks through what it has made itself.
    if setting.smoke:
        print("SMOKE: toy sizes on a CPU with stand-ins; none of these figures measures anything\n")
    ceilings = measure_ceilings(setting)
    setting = dataclasses.replace(setting, ceilings=ceilings)
    copied, multiplied = ceilings.copy_bytes_per_second, ceilings.flops_per_second
    print(f"ceilings: copy {copied / 1e9:.0f} GB/s (read and written), {setting.dtype} {multiplied / 1e12:.0f} TFLOP/s")
    figures = {"smoke": setting.smoke, "device": _device(setting), "ceilings": dataclasses.asdict(ceilings)}
    failed = False
    for name, section in _sections(args, setting):
        _print(section)
        failed = failed or bool(section.failures)
        figures[name] = {"rows": section.figures, "notes": section.notes, "failures": section.failures}
        if args.output or not setting.smoke:
            write_record("gpu", figures, args.output)
    print(f"\n{time.monotonic() - began:.0f} s in all; {'something failed' if failed else 'nothing failed'}")
    return 1 if failed else 0


def _sections(args: argparse.Namespace, setting: Setting):
    """Name and findings of one section after the other."""
    from benchmarks.gpu import kernels as gpu_kernels
    from benchmarks.gpu import model as gpu_model
    from benchmarks.gpu import peers as gpu_peers

    total = 60 * args.minutes
    simple: dict[str, Callable[[Setting, Clock], Section]] = {
        "kernels": gpu_kernels.run,
        "model": gpu_model.run,
        "peers": gpu_peers.run,
    }
    for name, run in simple.items():
        if name in args.sections:
            yield name, _guarded(name, setting, lambda run=run, name=name: run(setting, Clock(total * SECTIONS[name])))
    if not {"profiles", "policies"} & set(args.sections):
        return
    from benchmarks.gpu import policies as gpu_policies

    with gpu_policies.temporary() as elsewhere:
        folder, found = args.profiles or Path(elsewhere), []

        def profiles() -> Section:
            clock = Clock(setting.size(round(total * SECTIONS["profiles"]), 1))
            section, path = gpu_policies.profiles(setting, folder, clock, more=args.profiles is not None)
            found.append(path)
            return section

        yield "profiles", _guarded("profiles", setting, profiles)
        if "policies" in args.sections:
            clock = Clock(total * SECTIONS["policies"])
            yield (
                "policies",
                _guarded("policies", setting, lambda: gpu_policies.run(setting, clock, gpu_policies.read(found[0]))),
            )


def _guarded(name: str, setting: Setting, run: Callable[[], Section]) -> Section:
    """The section, or one that says how it failed."""
    began = time.monotonic()
    try:
        section = run()
    except Exception as error:
        traceback.print_exc()
        section = Section(title=name, header=("",), failures=[f"{type(error).__name__}: {error}"])
    give_back(setting)
    section.notes.append(f"{time.monotonic() - began:.0f} s")
    return section


def _print(section: Section) -> None:
    from exeplan.planner.reports.tables import table

    print(f"\n## {section.title}\n")
    if section.rows:
        print(table(section.header, section.rows))
    for kind, texts in (("note", section.notes), ("FAILED", section.failures)):
        for text in texts:
            print(f"{kind}: {text}", flush=True)


def _device(setting: Setting) -> str:
    return "CPU, smoke" if setting.smoke else torch.cuda.get_device_name(setting.place)


if __name__ == "__main__":
    sys.exit(main())
