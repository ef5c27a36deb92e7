"""lint() of imported rows names rates beyond the device's, falling times, and gaps; believable rows pass."""

import pytest

from exeplan.core.models.model import ModelSpec, model_spec
from exeplan.core.profile import Device, Measurement
from exeplan.errors import InputError
from exeplan.profiler.importing.imported_rows import ImportedRows
from exeplan.profiler.importing.lint import lint, refuse_falls, report, without_spikes

# 1 TFLOP/s and 100 GB/s; a layer of 12 * 512^2 = 3.1 million weights: 6.3 MB, 63 us at peak, 6.3 us a token.
DEVICE = Device(name="test", kind="cuda", memory_bytes=2**34, copy_bytes_per_second=100e9, flops_per_second=1e12)


@pytest.fixture
def spec() -> ModelSpec:
    config = {
        "model_type": "gpt2",
        "n_embd": 512,
        "n_layer": 4,
        "n_head": 8,
        "vocab_size": 1000,
        "n_positions": 2048,
    }
    return model_spec(config, name="toy")


def rest(num_tokens: int, seconds: float, degree: int = 1) -> Measurement:
    return Measurement(op="rest", num_tokens=num_tokens, seconds=seconds, tensor_parallel_size=degree)


def sentences(spec: ModelSpec, *rows: Measurement) -> list[str]:
    return [finding.sentence for finding in lint(rows, spec, "bfloat16", DEVICE)]


def test_believable_rows_pass(spec: ModelSpec) -> None:
    rows = [rest(n, 80e-6 + 7e-6 * n) for n in (1, 4, 16, 64)]
    rows += [Measurement(op="send", phase="inter", bytes=n, seconds=1e-5 + n / 10e9) for n in (2**14, 2**16)]
    assert sentences(spec, *rows) == []


def test_weights_read_faster_than_memory(spec: ModelSpec) -> None:
    assert sentences(spec, rest(1, 30e-6)) == [
        "rest num_tokens=1: 209.7 GB/s is beyond the device's memory bandwidth of 100"
    ]
    assert sentences(spec, rest(1, 32e-6, degree=2)) == []


def test_products_faster_than_the_peak(spec: ModelSpec) -> None:
    assert sentences(spec, rest(1000, 3e-3)) == [
        "rest num_tokens=1000: 2097 GFLOP/s is beyond the device's peak of 1000"
    ]


def test_keys_and_values_read_faster_than_memory(spec: ModelSpec) -> None:
    row = Measurement(op="attention", phase="decode", num_seqs=8, context_tokens=16000, seconds=1e-4)
    assert sentences(spec, row) == [
        "attention decode num_seqs=8 context_tokens=16000: 327.7 GB/s is beyond the device's memory bandwidth of 100"
    ]


def test_keys_and_values_outside_of_a_window_are_not_read(spec: ModelSpec) -> None:
    config = {**spec.config, "sliding_window": 500, "layer_types": ["sliding_attention"] * 4}
    rows = [Measurement(op="attention", phase="decode", num_seqs=8, context_tokens=16000, seconds=1e-4)]
    rows += [Measurement(op="attention", phase="prefill", num_seqs=1, num_tokens=2000, seconds=2e-3)]
    assert sentences(model_spec(config, name="toy"), *rows) == []


def test_a_link_faster_than_memory(spec: ModelSpec) -> None:
    row = Measurement(op="send", phase="intra", bytes=10**9, seconds=1e-3)
    assert sentences(spec, row) == [
        "send intra bytes=1000000000: 1000 GB/s is beyond the device's memory bandwidth of 100"
    ]


def test_a_device_that_is_not_known_has_no_limits(spec: ModelSpec) -> None:
    assert lint([rest(1, 1e-9)], spec, "bfloat16", None) == []


def test_falls_beyond_noise_are_found_at_each_degree(spec: ModelSpec) -> None:
    rows = [rest(16, 3e-4), rest(32, 2.9e-4), rest(16, 3e-3, 2), rest(32, 2e-3, 2)]
    (finding,) = lint(rows, spec, "bfloat16", DEVICE)
    assert finding.sentence == (
        "rest num_tokens=32 at tensor_parallel_size=2: 2 ms is less than the 3 ms of rest num_tokens=16 at "
        "tensor_parallel_size=2"
    )
    assert finding.ratio == pytest.approx(1.5)


def test_gaps(spec: ModelSpec) -> None:
    assert sentences(spec, rest(1, 1e-4), rest(4, 1e-4), rest(17, 2e-4)) == [
        "between rest num_tokens=4 and rest num_tokens=17 nothing was measured"
    ]


def test_the_worst_of_each_kind_are_reported_and_the_others_counted(spec: ModelSpec) -> None:
    rows = [rest(n, seconds) for n, seconds in zip((1, 2, 3, 4, 5), (5e-3, 3e-3, 2e-3, 1.5e-3, 1e-3), strict=True)]
    assert report(lint(rows, spec, "bfloat16", DEVICE)) == (
        "rest num_tokens=2: 3 ms is less than the 5 ms of rest num_tokens=1",
        "rest num_tokens=3: 2 ms is less than the 3 ms of rest num_tokens=2",
        "growth: 2 more, none of them worse",
    )


def test_a_time_that_falls_to_half_is_refused() -> None:
    with pytest.raises(InputError) as refusal:
        refuse_falls([rest(1, 2e-3), rest(2, 1e-3), rest(3, 1e-4)])
    assert str(refusal.value) == (
        "rest num_tokens=3: 0.1 ms is less than the 1 ms of rest num_tokens=2 (1 more fall to half or less); correct "
        "the row or leave it out"
    )


def test_spikes_are_left_out_of_tables_and_said() -> None:
    rows = [rest(n, seconds) for n, seconds in zip((1, 2, 3, 4, 5), (9e-3, 9e-3, 1e-3, 1.1e-3, 0.9e-3), strict=True)]
    part = without_spikes(ImportedRows(tuple(rows)))
    assert part.rows == tuple(rows[2:])
    assert part.notes == (
        "left out for taking at least twice as long as larger ones (2 in all): rest num_tokens=2 with 9 ms where rest "
        "num_tokens=3 takes 1 ms",
    )


def test_one_row_that_is_too_fast_does_not_take_the_others_with_it() -> None:
    rows = [rest(n, seconds) for n, seconds in zip((1, 2, 3, 4, 5), (1e-3, 1e-3, 1e-4, 1.1e-3, 1.2e-3), strict=True)]
    assert without_spikes(ImportedRows(tuple(rows))) == ImportedRows(tuple(rows))
