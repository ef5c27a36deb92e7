"""Every kernel compiles for a GPU, also in bfloat16, fits its shared memory, and spills no registers.

The interpreter shows what a kernel computes; it takes Python that the compiler refuses, and knows no registers.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from exeplan.kernels import language

from .conftest import compiled_environment

SHARED_MEMORY = 227 * 1024
"""Bytes that a program may have on sm_90."""
STACK = 64
"""Bytes that a thread may spill: triton 3.6 spills these where 3.7 spills nothing."""


@pytest.mark.skipif(not language.AVAILABLE, reason="triton is not installed")
def test_kernels_compile_and_spill_nothing(tmp_path):
    environment = compiled_environment() | {"TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    kernels = [(name, int(stack), int(shared)) for name, stack, shared in map(str.split, done.stdout.splitlines())]
    assert {name for name, _, _ in kernels} == {
        "_decode",
        "_join",
        "_prefill",
        "_mixed",
        "_slot",
        "_norm",
        "_rotate",
        "_activate",
        "_copy_slots",
        "_quantize",
        "_best_of_part",
        "_best_of_row",
        "_draw",
        "_expert_product",
    }
    launches = Counter(name for name, _, _ in kernels)
    assert [launches[name] for name in ("_decode", "_mixed", "_copy_slots")] == [3, 3, 4], "of keys in 8 bits, too"
    assert [kernel for kernel in kernels if kernel[1] > STACK or kernel[2] > SHARED_MEMORY] == []


@pytest.mark.skipif(not language.AVAILABLE, reason="triton is not installed")
def test_kernels_are_not_compiled_anew_for_batches_of_other_sizes(tmp_path):
    environment = compiled_environment() | {"TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, script, "sizes"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    compiled = Counter(name for name, _ in {tuple(line.split()) for line in done.stdout.splitlines()})
    assert (compiled["_mixed"], compiled["_slot"]) == (1, 1)
    assert compiled["_expert_product"] == 2, "up and down"
    assert compiled["_join"] == 3, "one for each power of two of parts"
