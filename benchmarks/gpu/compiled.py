"""What a GPU will do, read from compiled kernels: registers, spills, wide loads, and a predicted share of the roofline.

    python -m benchmarks.gpu.compiled [--only WORD] [--output FILE]

Needs no GPU: Triton compiles the kernels of `benchmarks.gpu.kernels`, at the same sizes and under the same names, for
sm_80, sm_90 and sm_100 with its own ptxas, launches stop behind the compiler, and SASS is read with the cuobjdump that
Triton ships. The record is to be held against the first run of `python -m benchmarks.gpu` by the names of the cases.

The prediction is the share of its ceiling (the datasheet's bandwidth or rate) that a case reaches if programs run in
whole waves: a launch whose programs do not fill the last wave of the GPU's multiprocessors waits for it all the same,
and each launch takes the datasheet's latency of an element-wise kernel. Several launches of a case count by their
programs. sm_100 is compiled only, as no datasheet of it is shipped. Not here: torch's products, and how well a program
hides its loads, which only a run shows.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import chain
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch

torch.backends.cuda.is_built = lambda: True  # Kernels are then defined for the compiler.

from benchmarks.gpu import kernels as gpu_kernels  # noqa: E402
from benchmarks.gpu.attention import attention_cases  # noqa: E402
from benchmarks.gpu.setting import Case, Setting  # noqa: E402
from benchmarks.lib.record import write_record  # noqa: E402
from exeplan.core.models.model import load_model_spec  # noqa: E402
from exeplan.kernels import language  # noqa: E402
from exeplan.kernels.attention import paged_attention  # noqa: E402
from exeplan.kernels.select import TRITON, Kernels  # noqa: E402
from exeplan.planner.reports.tables import table  # noqa: E402
from exeplan.profiler.datasheets.datasheet import load_datasheet  # noqa: E402

_REGISTERS, _THREADS, _PROGRAMS, _REGISTER_STEP = 65_536, 2048, 32, 8
"""Of a multiprocessor (CUDA C++ Programming Guide, technical specifications); registers are given out in steps."""
_RESERVED = 1024
"""Bytes of shared memory that the driver takes of each program."""
_SASS = {
    "loads": r"\bLDG\.",
    "loads of 128 bits": r"\bLDG\.\S*\.128\b",
    "asynchronous copies": r"\b(LDGSTS|UTMALDG)\b",
    "asynchronous copies of 128 bits": r"\bLDGSTS\.\S*\.128\b|\bUTMALDG\b",
    "matrix products": r"\b(HMMA|HGMMA|UTCHMMA|UTCQMMA)\b",
}


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU to compile for: multiprocessors, and shared memory of one (CUDA C++ Programming Guide)."""

    capability: int
    multiprocessors: int
    shared_memory: int
    datasheet: str | None


TARGETS = (
    Target(80, 108, 164 * 1024, "a100-80gb"),
    Target(90, 132, 228 * 1024, "h100-80gb"),
    Target(100, 148, 228 * 1024, None),
)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel that would have been launched."""

    kernel: Any
    """Compiled."""
    programs: int


@dataclass(frozen=True, kw_only=True)
class Compiling(Setting):
    """The full sizes, over tensors that nothing reads or writes."""

    capability: int

    @property
    def in_fp8(self) -> bool:
        return self.capability >= 89

    @property
    def kernels(self) -> Kernels:
        return TRITON

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.torch_dtype, device=self.place)


class NamedGpu:
    """Stands in for Triton's driver: it only names the GPU. Each target is a device of its own to Triton's caches."""

    def __init__(self) -> None:
        self.number = 0

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", TARGETS[self.number].capability, 32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="WORD", default="", help="cases whose names have this word")
    parser.add_argument("--output", type=Path, metavar="FILE", help="instead of benchmarks/records/gpu-compiled.json")
    args = parser.parse_args()
    if not language.AVAILABLE or language.INTERPRETED:
        print("benchmarks.gpu.compiled: needs triton, not interpreted: pip install 'exeplan[test]' on Linux")
        return 2
    rows = list(chain.from_iterable(compiled(number, args.only) for number in range(len(TARGETS))))
    header = ("target", "case", "kernel", "registers", "spills", "shared", "resident", "wide loads", "share")
    print(table(header, [_cells(row) for row in rows]))
    spilled = sorted(
        {f"{kernel['name']} on sm_{row['sm']}" for row in rows for kernel in row["kernels"] if kernel["spills"]}
    )
    print(f"{len(rows)} cases; " + (f"registers are spilled by {', '.join(spilled)}" if spilled else "nothing spills"))
    if args.output or not args.only:
        write_record("gpu-compiled", {"cases": rows}, args.output)
    return 0


def compiled(number: int, only: str = "") -> list[dict[str, Any]]:
    """A row for each case on one target."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    target, gpu, launches = TARGETS[number], NamedGpu(), []
    gpu.number = number
    driver.set_active(gpu)
    kernels: Any = paged_attention
    kernels._num_multiprocessors = lambda device: target.multiprocessors
    run = JITFunction.run

    def compile_only(function: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        kernel = run(function, *args, grid=grid, warmup=True, **options)
        launches.append(Launch(kernel, prod(grid(options) if callable(grid) else grid)))
        return kernel

    setting = Compiling(
        place=torch.device("cpu"),
        smoke=False,
        spec=load_model_spec("llama-3.1-8b"),
        dtype="bfloat16",
        cache_bytes=1,
        capability=target.capability,
    )
    rows = []
    JITFunction.run = compile_only
    try:
        for case in _cases(setting):
            if only in case.name:
                launches.clear()
                with torch.inference_mode():
                    case.ours(*case.make())
                rows.append(_row(case, target, launches))
                print(f"sm_{target.capability} {case.name}", file=sys.stderr)
    finally:
        JITFunction.run = run
    return rows


def _cases(setting: Setting) -> list[Case]:
    found = chain(
        attention_cases(setting),
        gpu_kernels._caches(setting),
        gpu_kernels._rows(setting),
        gpu_kernels._sampling(setting),
    )
    return list(found)


def _row(case: Case, target: Target, launches: list[Launch]) -> dict[str, Any]:
    kernels = [_reading(launch, target) for launch in launches]
    row = {"sm": target.capability, "case": case.name, "bytes": case.num_bytes, "flops": case.flops, "kernels": kernels}
    if target.datasheet:
        sheet = load_datasheet(target.datasheet)
        moving = case.num_bytes / sheet.memory_bandwidth
        computing = case.flops / sheet.bfloat16_flops
        floor, programs = max(moving, computing), sum(kernel["programs"] for kernel in kernels)
        waited = sum(kernel["programs"] / programs / kernel["filled"] for kernel in kernels)
        seconds = floor * waited + len(kernels) * sheet.elementwise_latency
        row |= {
            "bound": "bandwidth" if moving >= computing else "rate",
            "floor_seconds": floor,
            "predicted_share": floor / seconds,
        }
    return row


def _reading(launch: Launch, target: Target) -> dict[str, Any]:
    """One compiled kernel."""
    kernel, bins = launch.kernel, _tools()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _output(bins / "cuobjdump", "--dump-resource-usage", file.name)
        sass = _output(bins / "cuobjdump", "-sass", file.name)
    registers, stack = (int(re.findall(rf"{word}:(\d+)", usage)[0]) for word in ("REG", "STACK"))
    threads, shared = 32 * kernel.metadata.num_warps, kernel.metadata.shared
    resident = _resident(target, threads=threads, registers=registers, shared=shared)
    return {
        "name": kernel.metadata.name,
        "registers": registers,
        "spills": stack,
        "shared_memory": shared,
        "threads": threads,
        "programs": launch.programs,
        "resident_programs": resident,
        "filled": filled(launch.programs, resident, target.multiprocessors),
        **{name.replace(" ", "_"): len(re.findall(pattern, sass)) for name, pattern in _SASS.items()},
    }


def filled(programs: int, resident: int, multiprocessors: int) -> float:
    """How much of the time of its waves a launch uses all multiprocessors, of which each runs `resident` programs."""
    if programs <= multiprocessors:
        return programs / multiprocessors
    waves = programs / (resident * multiprocessors)
    return waves / ceil(waves) if waves > 1 else programs / multiprocessors / ceil(programs / multiprocessors)


def _resident(target: Target, *, threads: int, registers: int, shared: int) -> int:
    """Programs of a kernel that one multiprocessor runs at once."""
    held = ceil(registers / _REGISTER_STEP) * _REGISTER_STEP * threads
    return min(_REGISTERS // held, target.shared_memory // (shared + _RESERVED), _THREADS // threads, _PROGRAMS)


def _tools() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends/nvidia/bin"


def _output(*command: object) -> str:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    kernels = row["kernels"]

    def each(value: Any) -> str:
        return ", ".join(str(value(kernel)) for kernel in kernels)

    def wide(kernel: dict[str, Any]) -> str:
        return (
            f"{kernel['loads_of_128_bits'] + kernel['asynchronous_copies_of_128_bits']}"
            f" of {kernel['loads'] + kernel['asynchronous_copies']}"
        )

    return (
        f"sm_{row['sm']}",
        row["case"],
        each(lambda kernel: kernel["name"]),
        each(lambda kernel: kernel["registers"]),
        each(lambda kernel: kernel["spills"]),
        each(lambda kernel: kernel["shared_memory"]),
        each(lambda kernel: kernel["resident_programs"]),
        each(wide),
        f"{100 * row['predicted_share']:.0f} % {row['bound']}" if "predicted_share" in row else "-",
    )


if __name__ == "__main__":
    sys.exit(main())
