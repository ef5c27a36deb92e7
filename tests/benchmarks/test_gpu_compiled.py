"""Kernels compiled for three GPUs are read: nothing spills, keys and values come in 128-bit copies, waves count."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if not importlib.util.find_spec("triton"):  # Not imported: the kernels' tests say how it is, interpreted.
    pytest.skip("triton is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[dict]:
    """Decode attention in one launch, the same over keys in fp8, and in two launches."""
    folder = tmp_path_factory.mktemp("compiled")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(folder / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    output = folder / "compiled.json"
    command = [sys.executable, "-m", "benchmarks.gpu.compiled", "--only", "context 4096", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert "8 cases; nothing spills" in done.stdout
    return json.loads(output.read_text())["cases"]


def test_each_case_is_compiled_for_every_target_that_has_its_dtype(rows):
    """sm_80 has no 8-bit floats."""
    found = [(row["sm"], "fp8" in row["case"], [kernel["name"] for kernel in row["kernels"]]) for row in rows]
    assert found == [
        (sm, in_fp8, kernels)
        for sm in (80, 90, 100)
        for in_fp8, kernels in ((False, ["_decode"]), (True, ["_decode"]), (False, ["_decode", "_join"]))
        if sm > 80 or not in_fp8
    ]


def test_keys_and_values_are_copied_asynchronously_and_16_bytes_at_once(rows):
    for row in (row for row in rows if "fp8" not in row["case"]):
        decode = row["kernels"][0]
        assert decode["asynchronous_copies_of_128_bits"] == 32
        assert decode["asynchronous_copies"] <= 32 + 4  # Block numbers, of 4 bytes each.
        assert decode["matrix_products"] > 0
        assert decode["spills"] == 0


def test_the_programs_that_are_resident_use_the_registers_and_the_memory_that_there_are(rows):
    for kernel in (kernel for row in rows for kernel in row["kernels"]):
        assert kernel["resident_programs"] * kernel["threads"] * kernel["registers"] <= 65_536
        assert kernel["resident_programs"] * kernel["shared_memory"] <= 228 * 1024
        assert 0 < kernel["filled"] <= 1


def test_only_gpus_with_a_datasheet_are_predicted_and_none_beyond_its_ceiling(rows):
    assert [row["sm"] for row in rows if "predicted_share" in row] == [80, 80, 90, 90, 90]
    assert all(0.5 < row["predicted_share"] < 1 for row in rows if "predicted_share" in row)
