"""A corrected profile keeps physics: no decode step under the bytes that it reads, and none that falls with rows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from exeplan.api import datasheet_profile
from exeplan.core.correction import Correction
from exeplan.core.models.layer_costs import layer_kv_bytes_per_token, layer_parameters_read
from exeplan.core.models.model import DTYPE_BYTES, load_model_spec, model_spec
from exeplan.core.profile import Profile, load_profile, save_profile
from exeplan.core.schedule import Sharding
from exeplan.simulator.corrected_rows import corrected_rows
from exeplan.simulator.timings import Timings

STRONG = [
    Correction(level=-2.0),
    Correction(level=-1.0, slope=-0.5),
    Correction(level=0.3, slope=0.4),
    Correction(level=0.1, slope=-0.6, prefill=0.5, links=-1.0),
]
ROWS = np.array([1, 2, 3, 8, 15, 16, 17, 64, 256, 1024])


@pytest.fixture(scope="module", params=["qwen3-30b-a3b", "deepseek-v2-lite", "llama-3.1-8b"])
def profile(request: pytest.FixtureRequest) -> Profile:
    return datasheet_profile(request.param, "h100-80gb", tensor_parallel_sizes=(2,))


@pytest.mark.parametrize("correction", STRONG)
def test_no_decode_step_is_under_the_bytes_that_it_reads(profile: Profile, correction: Correction) -> None:
    shard, spec = Timings(replace(profile, correction=correction)).shard(Sharding(2)), profile.model
    bandwidth = profile.device.copy_bytes_per_second
    for rows in ROWS:
        read = layer_parameters_read(spec, int(rows)) * DTYPE_BYTES[profile.dtype] / 2
        assert shard.rest["decode"](np.array([rows]))[0] >= read / bandwidth
    for row in corrected_rows(replace(profile, correction=correction)):
        if (row.op, row.phase) == ("attention", "decode"):
            share = max(1 / 2, 1 / spec.num_kv_shares)
            kept = layer_kv_bytes_per_token(spec, profile.cache_dtype) * share * row.context_tokens
            assert row.seconds >= kept / bandwidth


def test_attention_within_a_window_need_not_read_what_is_outside() -> None:
    """A strong correction leaves it the bytes within the window."""
    config = {**load_model_spec("llama-3.1-8b").config, "model_type": "mistral", "sliding_window": 4096}
    spec = model_spec(config, name="windowed")
    whole = datasheet_profile(spec, "h100-80gb", tensor_parallel_sizes=(1,))
    rows = corrected_rows(replace(whole, correction=Correction(level=-2.0)))
    decode = [row for row in rows if (row.op, row.phase, row.num_seqs) == ("attention", "decode", 64)]
    for row in decode:
        read = min(row.context_tokens, 64 * 4096) * layer_kv_bytes_per_token(spec, whole.cache_dtype)
        least = read / whole.device.copy_bytes_per_second
        assert least <= row.seconds
        assert row.context_tokens < 64 * 4096 or row.seconds <= 1.03 * least


@pytest.mark.parametrize("correction", STRONG)
def test_times_do_not_fall_as_rows_or_tokens_are_added(profile: Profile, correction: Correction) -> None:
    shard = Timings(replace(profile, correction=correction)).shard(Sharding(2))
    for curve in (shard.rest["decode"], shard.rest["prefill"], shard.decode_curve(16), shard.prefill_curve(16)):
        times = [float(curve(np.array([float(size)]))[0]) for size in (16, 32, 64, 512, 4096, 65536)]
        assert times == sorted(times)
    decode = shard.rest["decode"](ROWS)
    assert (np.diff(decode) >= 0).all()


def test_a_factor_is_one_on_all_times_and_none_changes_nothing(profile: Profile) -> None:
    assert corrected_rows(profile) == profile.measurements
    before = Timings(profile).shard(Sharding(2))
    after = Timings(replace(profile, correction=Correction(level=0.5))).shard(Sharding(2))
    for name in ("embed", "head"):
        sizes = np.array([4.0, 100.0])
        assert getattr(after, name)(sizes) == pytest.approx(np.exp(0.5) * getattr(before, name)(sizes))


def test_a_profile_keeps_its_correction(profile: Profile, tmp_path: Path) -> None:
    corrected = replace(profile, correction=Correction(level=0.1, shared=("engine",), spreads={"ttft": 0.3}))
    save_profile(corrected, tmp_path / "p.json")
    found = load_profile(tmp_path / "p.json")
    assert found.correction == corrected.correction
    assert found.fingerprint == corrected.fingerprint != profile.fingerprint
