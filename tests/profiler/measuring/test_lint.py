"""lint() reports impossible rows and accepts a plausible profile."""

import subprocess
import sys
from dataclasses import replace

import pytest

from exeplan.core.models.model import model_spec
from exeplan.core.profile import Device, Measurement, Profile
from exeplan.profiler.measuring.lint import lint

# A layer of 10 million weights: 40 MB, 2 ms at 20 GB/s; 20 MFLOP a token, 0.2 ms at 100 GFLOP/s.
LAYERS, HIDDEN, VOCAB = 10, 512, 1000
WEIGHT_BYTES = LAYERS * 40_000_000 + 2 * VOCAB * HIDDEN * 4


def rest(num_tokens: int) -> Measurement:
    return Measurement(op="rest", num_tokens=num_tokens, seconds=2.2e-3 + 0.21e-3 * num_tokens, repeats=5)


def decode(num_seqs: int, context: int) -> Measurement:
    tokens = num_seqs * context
    seconds = 20e-6 * num_seqs + tokens * 4096 / 18e9
    return Measurement(op="attention", phase="decode", num_seqs=num_seqs, context_tokens=tokens, seconds=seconds)


def head(num_seqs: int) -> Measurement:
    return Measurement(op="head", num_seqs=num_seqs, seconds=1e-3 + 1e-5 * num_seqs)


@pytest.fixture
def clean() -> Profile:
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
    }
    device = Device(
        name="test",
        kind="cpu",
        memory_bytes=2**33,
        copy_bytes_per_second=20e9,
        flops_per_second=100e9,
        cache_bytes=2**25,
    )
    rows = [
        *(rest(n) for n in (1, 4, 64, 256)),
        *(decode(n, c) for n in (1, 8) for c in (16, 256, 2000)),
        *(head(n) for n in (1, 8)),
        Measurement(op="attention", phase="prefill", num_seqs=1, num_tokens=256, seconds=2e-3),
        Measurement(op="embed", num_tokens=1, seconds=5e-5),
        Measurement(op="overhead", phase="decode", num_seqs=1, seconds=3e-4),
        Measurement(op="overhead", phase="prefill", num_seqs=1, num_tokens=32, seconds=3e-4),
    ]
    return Profile(
        model=model_spec(config, name="test"),
        dtype="float32",
        device=device,
        weight_bytes=WEIGHT_BYTES,
        workspace_bytes=1,
        measurements=tuple(rows),
    )


def planted(profile: Profile, row: Measurement) -> Profile:
    """The profile with a row in place of the one that has its axes."""
    kept = tuple(m for m in profile.measurements if replace(m, seconds=1, spread=0, repeats=1) != _axes(row))
    return replace(profile, measurements=(*kept, row))


def _axes(row: Measurement) -> Measurement:
    return replace(row, seconds=1, spread=0, repeats=1)


def test_a_believable_profile_is_clean(clean: Profile) -> None:
    assert lint(clean) == []


def test_weights_read_faster_than_memory_allows(clean: Profile) -> None:
    (finding,) = lint(planted(clean, replace(rest(1), seconds=0.5e-3)))
    assert finding == "rest num_tokens=1: 60 GB/s is beyond the device's copy bandwidth of 20"


def test_weights_that_fit_the_cache_may_be_read_faster(clean: Profile) -> None:
    cached = replace(clean, device=replace(clean.device, cache_bytes=2**30))
    assert lint(planted(cached, replace(rest(1), seconds=0.5e-3))) == []


def test_keys_and_values_read_faster_than_memory_allows(clean: Profile) -> None:
    (finding,) = lint(planted(clean, replace(decode(8, 2000), seconds=1.1e-3)))
    assert finding.startswith("attention decode num_seqs=8 context_tokens=16000: ")
    assert "copy bandwidth" in finding


def test_attention_within_a_window_reads_and_computes_no_more_than_that(clean: Profile) -> None:
    """Over 2000 tokens within 256 it takes what it takes over 256, and a prompt an eighth of the pairs."""
    prefill = Measurement(op="attention", phase="prefill", num_seqs=1, num_tokens=2000, seconds=16e-3)
    whole = planted(planted(clean, replace(decode(8, 2000), seconds=decode(8, 256).seconds)), prefill)
    windowed = model_spec({**clean.model.config, "model_type": "mistral", "sliding_window": 256}, name="test")
    assert lint(replace(whole, model=windowed)) == []
    assert len(lint(whole)) == 2


def test_products_faster_than_the_matrix_rate(clean: Profile) -> None:
    (finding,) = lint(planted(clean, replace(rest(256), seconds=25e-3)))
    assert finding == "rest num_tokens=256: 204.8 GFLOP/s is beyond the device's matrix rate of 100"


@pytest.mark.parametrize(
    ("slow", "less"),
    [
        (replace(rest(4), seconds=0.03), "rest num_tokens=64"),
        (replace(decode(1, 256), seconds=0.005), "attention decode num_seqs=1 context_tokens=2000"),
        (replace(head(1), seconds=0.005), "head num_seqs=8"),
    ],
)
def test_time_that_falls_as_work_grows(clean: Profile, slow: Measurement, less: str) -> None:
    (finding,) = lint(planted(clean, slow))
    assert finding.startswith(f"{less}: ")
    assert f"is less than the {slow.seconds * 1e3:g} ms of " in finding


def test_a_fall_within_noise_is_none(clean: Profile) -> None:
    slow = replace(rest(1), seconds=3.1e-3, spread=0.05)
    assert lint(planted(clean, slow)) == []


def test_duplicates(clean: Profile) -> None:
    (finding,) = lint(replace(clean, measurements=(*clean.measurements, head(8))))
    assert finding == "head num_seqs=8 occurs 2 times"


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0])
def test_what_is_no_time(clean: Profile, seconds: float) -> None:
    (finding,) = lint(planted(clean, replace(head(8), seconds=seconds)))
    assert finding.startswith("head num_seqs=8: ")
    assert "not a time" in finding


def test_repeats_that_never_settled(clean: Profile) -> None:
    (finding,) = lint(planted(clean, replace(head(8), spread=0.4)))
    assert finding == "head num_seqs=8: its repeats differ by 40% of their median, so it never settled"


def test_needs_no_torch() -> None:
    code = "import sys, exeplan.profiler.measuring.lint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
