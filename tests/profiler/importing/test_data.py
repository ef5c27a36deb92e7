"""Published tables of A40, A100 and H100 machines are imported whole, where they are available.

EXEPLAN_DATA names a folder with `profiles/vidur` and `profiles/aiconfigurator` (tidied tables in `tidy_bf16`).
"""

import os
from pathlib import Path

import numpy as np
import pytest

from exeplan.core.models.model import model_spec
from exeplan.core.profile import Profile, load_profile, save_profile
from exeplan.profiler.datasheets.datasheet import load_datasheet
from exeplan.profiler.importing import aiconfigurator, import_profile
from exeplan.profiler.importing.tables import read_tables

FOLDER = Path(os.environ.get("EXEPLAN_DATA", ""), "profiles")
pytestmark = pytest.mark.skipif("EXEPLAN_DATA" not in os.environ, reason="EXEPLAN_DATA names no folder of real tables")
TIDY = "aiconfigurator/tidy_bf16"
LLAMA = {"model_type": "llama", "hidden_act": "silu", "max_position_embeddings": 4096}
MODELS = {
    "llama-3.1-8b": LLAMA
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
    "llama-2-7b": LLAMA
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
    },
    "llama-2-70b": LLAMA
    | {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 32000,
    },
    "opt-13b": {
        "model_type": "opt",
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "ffn_dim": 20480,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
    },
}
CASES = [
    ("llama-3.1-8b", "h100-80gb", (TIDY,)),
    ("llama-3.1-8b", "h200-141gb", (TIDY,)),
    ("llama-2-70b", "a100-80gb", (TIDY,)),
    ("opt-13b", "a100-80gb", (TIDY,)),
    (
        "llama-2-7b",
        "a40-48gb",
        (
            "vidur/main/compute/a40/meta-llama/Llama-2-7b-hf/mlp.csv.gz",
            "vidur/a40_attention_excerpt.csv",
            "vidur/oss-release/a40",
        ),
    ),
    (
        "llama-2-70b",
        "a100-80gb",
        (
            "vidur/main/compute/a100/meta-llama/Llama-2-70b-hf/mlp.csv.gz",
            f"{TIDY}/a100_sxm.prefill_attention.csv.gz",
            f"{TIDY}/a100_sxm.decode_attention.csv.gz",
            "vidur/main/network/a100_dgx",
        ),
    ),
]


def imported(model: str, device: str, paths: tuple[str, ...]) -> tuple[Profile, tuple[str, ...]]:
    spec = model_spec(MODELS[model], name=model)
    return import_profile([FOLDER / path for path in paths], spec=spec, device=device)


@pytest.mark.parametrize(("model", "device", "paths"), CASES)
def test_a_profile_of_every_degree_within_the_device_s_limits(
    tmp_path: Path, model: str, device: str, paths: tuple[str, ...]
) -> None:
    profile, said = imported(model, device, paths)
    assert profile.tensor_parallel_sizes == (1, 2, 4, 8)
    assert len(profile.measurements) < 5000
    assert not [line for line in said if "is beyond the device's" in line]
    for degree in profile.tensor_parallel_sizes:
        for phase in ("prefill", "decode"):
            rows = [m for m in profile.measurements if (m.phase, m.tensor_parallel_size) == (phase, degree)]
            assert {m.op for m in rows} >= {"attention", "overhead"}
    save_profile(profile, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json").fingerprint == profile.fingerprint


def test_layers_of_both_formats_agree() -> None:
    """Llama-2-70B on A100, measured by operation and summed from products: two engines, two years apart."""
    products, _ = imported(*CASES[2])
    operations, _ = imported(*CASES[5])
    found = []
    for degree in (1, 2, 4, 8):
        curves = [
            dict(
                sorted(
                    (m.num_tokens, m.seconds)
                    for m in p.measurements
                    if (m.op, m.tensor_parallel_size) == ("rest", degree)
                )
            )
            for p in (products, operations)
        ]
        both = [n for n in curves[0] if n in curves[1]]
        found += [curves[0][n] / curves[1][n] for n in both]
    assert abs(np.median(found) - 1) < 0.1
    assert np.quantile(np.abs(np.log(found)), 0.9) < 0.3


@pytest.mark.parametrize(("device", "chip"), [("h100-80gb", "h100"), ("a100-80gb", "a100")])
def test_products_left_out_are_missed_by_few_percent(device: str, chip: str) -> None:
    tables, _ = read_tables([FOLDER / TIDY], device=chip, format="auto")
    sheet = load_datasheet(device)
    products = [table for table in tables if table.kind == "gemm"]
    found = aiconfigurator.gemm_table(products, flops=sheet.bfloat16_flops, bandwidth=sheet.memory_bandwidth)
    assert np.median(found.misses) < 0.04
    assert np.quantile(found.misses, 0.9) < 0.15
