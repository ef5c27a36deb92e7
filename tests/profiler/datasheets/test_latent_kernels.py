"""Shipped tables of latent attention rise with the work, never beat the device, and are what was measured."""

from dataclasses import replace

import numpy as np
import pytest

from exeplan.core.models.model import load_model_spec
from exeplan.errors import InputError
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet
from exeplan.profiler.datasheets.latent_kernels import (
    Kernel,
    latent_attention_seconds,
    least_seconds,
    load_latent_kernels,
    roofline_seconds,
)
from exeplan.profiler.datasheets.roofline import Datasheet

LATENT = load_model_spec("deepseek-v3").latent
assert LATENT is not None
SHEETS = ("h100-80gb", "h200-141gb")
KERNELS = [
    Kernel(phase=phase, latent=LATENT, compute_dtype="bfloat16", dtype=dtype)
    for phase in ("decode", "prefill")
    for dtype in ("bfloat16", "fp8")
]


def seconds(sheet: Datasheet, kernel: Kernel, heads: int, num_seqs: int, tokens: int) -> float:
    return latent_attention_seconds(sheet, kernel, heads=heads, num_seqs=num_seqs, tokens=tokens)


@pytest.mark.parametrize("name", SHEETS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: f"{kernel.phase}-{kernel.dtype}")
@pytest.mark.parametrize("heads", [1, 16, 24, 128])
def test_rises_with_sequences_and_tokens_and_never_beats_the_peaks(name: str, kernel: Kernel, heads: int) -> None:
    """Beyond the table, too: it ends at 131072 cached or 32768 new tokens, and 1024 sequences or 256 prompts."""
    sheet = load_datasheet(name)
    seqs, tokens = (1, 3, 16, 100, 256, 1024, 2048), (1, 5, 64, 1000, 3000, 16384, 40_000, 200_000)
    found = np.array([[seconds(sheet, kernel, heads, n, x) for x in tokens] for n in seqs])
    least = [[least_seconds(sheet, kernel, heads=heads, num_seqs=n, tokens=x) for x in tokens] for n in seqs]
    assert (found >= np.array(least)).all()
    rounding = 1 - 1e-12
    assert (found[1:] >= rounding * found[:-1]).all()
    assert (found[:, 1:] >= rounding * found[:, :-1]).all()


def test_is_what_was_measured_where_nothing_disturbed_it() -> None:
    sheet = load_datasheet("h200-141gb")
    grid = load_latent_kernels("h200-141gb-latent").grids["decode", "bfloat16"][16]
    at = (list(grid.num_seqs).index(64), list(grid.tokens).index(8192))
    assert seconds(sheet, KERNELS[0], 16, 64, 8192) == pytest.approx(grid.seconds[at])
    # Disturbed: 2.2 ms for 32 sequences of 4 tokens, where 32 of 8 and 64 of 4 take a hundredth.
    spike = grid.seconds[list(grid.num_seqs).index(32), list(grid.tokens).index(4)]
    assert spike > 50 * seconds(sheet, KERNELS[0], 16, 32, 4)


def test_other_shapes_dtypes_and_overridden_constants_are_by_the_roofline() -> None:
    sheet = load_datasheet("h100-80gb")
    narrow = replace(KERNELS[0], latent=replace(LATENT, kv_rank=256))
    for kernel in (narrow, replace(KERNELS[0], dtype="float32")):
        found = seconds(sheet, kernel, 16, 8, 1000)
        assert found == roofline_seconds(sheet, kernel, heads=16, num_seqs=8, tokens=1000)
    changed = load_datasheet("h100-80gb", {"decode_attention_efficiency": "0.5"})
    assert changed.latent_kernels == ""
    assert load_datasheet("h100-80gb", {"host_seconds": "2ms"}).latent_kernels == "h100-80gb-latent"


def test_a_profile_says_that_it_has_them() -> None:
    sheet = load_datasheet("h100-80gb")
    sources = [
        profile_from_datasheet(load_model_spec(model), sheet, dtype="bfloat16", tensor_parallel_sizes=(1,)).source
        for model in ("deepseek-v2-lite", "qwen3-30b-a3b")
    ]
    assert sources == ["datasheet h100-80gb, latent attention as TensorRT-LLM 1.3.0rc20", "datasheet h100-80gb"]


def test_an_unknown_table_is_named() -> None:
    sheet = replace(load_datasheet("h100-80gb"), latent_kernels="b200")
    with pytest.raises(InputError, match="no table of kernels 'b200' is shipped; there are h100-80gb-latent"):
        seconds(sheet, KERNELS[0], 16, 1, 1)
