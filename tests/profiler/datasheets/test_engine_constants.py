"""with_engine() changes exactly the rows of an engine's constants, and the shipped constants are read."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from exeplan.api import datasheet_profile
from exeplan.cli import main
from exeplan.core.batch import Batch, SequenceState
from exeplan.core.pass_memory import MEMORY_UTILIZATION
from exeplan.core.profile import Measurement, Profile, load_profile, save_profile
from exeplan.core.schedule import Schedule, Stage
from exeplan.errors import InputError
from exeplan.files import shipped, shipped_names
from exeplan.profiler.datasheets.engine_constants import EngineConstants, load_engine, with_engine
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.cost import CostModel
from exeplan.simulator.memory import kv_capacity_tokens, weight_bytes
from exeplan.workload.workload import Workload

NEUTRAL = EngineConstants(
    name="plain", layer=0.0, row=1e-9, all_reduce_skew=0.0, uncaptured_layer=1e-9, prefill_factor=1.0, memory_share=1.0
)
US = 1e-6


def rows(profile: Profile, op: str, phase: str) -> list[Measurement]:
    return [m for m in profile.measurements if (m.op, m.phase) == (op, phase)]


def seconds(profile: Profile, op: str, phase: str) -> list[float]:
    return [m.seconds for m in rows(profile, op, phase)]


def decoding(num_tokens: int) -> SequenceState:
    return SequenceState(request_id="", num_prompt_tokens=num_tokens, max_output_tokens=9, num_output_tokens=1)


def test_a_layer_s_constant_is_in_every_pass(profile: Profile) -> None:
    slower = with_engine(profile, replace(NEUTRAL, layer=7 * US))
    expected = [m.seconds + 7 * US for m in rows(profile, "rest", "")]
    assert seconds(slower, "rest", "decode") == pytest.approx(expected)
    assert seconds(slower, "rest", "prefill") == pytest.approx(expected)
    batch = Batch(decode=(decoding(64), decoding(64)))
    layers = profile.model.num_layers
    plain = CostModel(with_engine(profile, NEUTRAL)).batch_seconds(batch)
    assert CostModel(slower).batch_seconds(batch) - plain == pytest.approx(layers * 7 * US)


def test_fusing_takes_away_no_more_than_half_a_layer(profile: Profile) -> None:
    fused = with_engine(profile, replace(NEUTRAL, layer=-1.0))
    assert seconds(fused, "rest", "decode") == pytest.approx([m.seconds / 2 for m in rows(profile, "rest", "")])


def test_passes_with_prompts_take_the_factor_and_at_least_the_launches(profile: Profile) -> None:
    engine = replace(NEUTRAL, prefill_factor=1.25, uncaptured_layer=300 * US)
    changed = with_engine(profile, engine)
    kernels = [m.seconds for m in rows(profile, "rest", "")]
    assert seconds(changed, "rest", "prefill") == pytest.approx([max(1.25 * s, 300 * US) for s in kernels])
    assert seconds(changed, "rest", "decode") == pytest.approx(kernels)
    attention = [1.25 * s for s in seconds(profile, "attention", "prefill")]
    assert seconds(changed, "attention", "prefill") == pytest.approx(attention)
    assert rows(changed, "attention", "decode") == rows(profile, "attention", "decode")


def test_devices_that_do_not_arrive_together_delay_every_sum(profile: Profile) -> None:
    sums = tuple(
        Measurement(op="all_reduce", phase="intra", tensor_parallel_size=n, bytes=1024, seconds=10 * US) for n in (2, 8)
    )
    profile = replace(profile, measurements=(*profile.measurements, *sums))
    changed = with_engine(profile, replace(NEUTRAL, all_reduce_skew=4 * US))
    assert seconds(changed, "all_reduce", "intra") == pytest.approx([14 * US, 22 * US])


def test_the_host_takes_its_time_for_each_row_and_nothing_else(profile: Profile) -> None:
    cost = CostModel(with_engine(profile, replace(NEUTRAL, row=30 * US)))
    for count in (1, 7, 64):
        assert cost.overhead.at(count) == pytest.approx(count * 30 * US)
        assert cost.prefill_overhead.at(count) == pytest.approx(count * 30 * US)


@pytest.mark.parametrize("share", [0.85, 0.6])
def test_weights_and_tokens_take_the_share_of_the_memory(profile: Profile, share: float) -> None:
    """Of the whole device, where the plan may use as much of it as plans do."""
    placement = (Stage(devices=(0,), layers=(0, profile.model.num_layers)),)
    changed = with_engine(profile, replace(NEUTRAL, memory_share=share))
    room = kv_capacity_tokens(changed, placement, MEMORY_UTILIZATION * profile.device.memory_bytes)
    kept = room * profile.model.kv_bytes_per_token(profile.dtype) + weight_bytes(changed, placement, 0)
    assert kept == pytest.approx(share * profile.device.memory_bytes, rel=1e-6)


def test_the_closed_form_times_passes_with_prompts_by_their_own_rows(profile: Profile) -> None:
    workload = Workload.of("same", inputs=[64], outputs=[2], weights=[1.0])
    schedule = Schedule("rra", {"prefill_batch": 1, "decode_steps": 1})
    engine = replace(NEUTRAL, uncaptured_layer=0.5)
    steady = steady_state(schedule, workload, CostModel(with_engine(profile, engine)))
    plain = steady_state(schedule, workload, CostModel(with_engine(profile, NEUTRAL)))
    layers, rest = profile.model.num_layers, 40 * US + 64 * 20 * US
    assert steady.ttft - plain.ttft == pytest.approx(layers * (0.5 - rest), rel=1e-3)
    assert steady.tpot == pytest.approx(plain.tpot)


def test_the_profile_says_its_engine_survives_its_file_and_takes_no_second(profile: Profile, tmp_path: Path) -> None:
    changed = with_engine(profile, replace(NEUTRAL, layer=5 * US))
    assert changed.source == "measured with plain"
    save_profile(changed, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json").fingerprint == changed.fingerprint
    with pytest.raises(InputError, match="the profile is 'measured with plain' already"):
        with_engine(changed, NEUTRAL)


def test_an_encoder_decoder_model_has_no_such_constants(profile: Profile) -> None:
    spec = replace(profile.model, num_encoder_layers=2)
    with pytest.raises(InputError, match="constants of plain are of decoder-only models, and demo is none"):
        with_engine(replace(profile, model=spec), NEUTRAL)


@pytest.mark.parametrize("name", shipped_names("engines"))
def test_shipped_engines_are_read(name: str) -> None:
    engine = load_engine(name)
    assert engine.name == name
    assert 0.5 < engine.memory_share < 1
    assert 0.9 < engine.prefill_factor < 1.3
    assert all(math.isfinite(value) for value in (engine.layer, engine.row, engine.uncaptured_layer))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("row: 0us", "row must be above zero, found '0us'"),
        ("layer: fast", "layer must be a duration such as 2s, 500ms or 1m, found 'fast'"),
        ("memory_share: 1.2", "memory_share is at most 1, found 1.2"),
        ("prefill_factor: -1", "prefill_factor must be a number above 0, found -1"),
        ("speed: 1", "'speed' is unknown"),
    ],
)
def test_a_wrong_file_is_refused_by_the_constant_at_fault(change: str, message: str, tmp_path: Path) -> None:
    lines = ["layer: -1us", "row: 5us", "all_reduce_skew: 2us", "uncaptured_layer: 1ms"]
    lines += ["prefill_factor: 1.1", "memory_share: 0.8"]
    name = change.split(":")[0]
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join([*(line for line in lines if not line.startswith(f"{name}:")), change]))
    with pytest.raises(InputError, match=f"mine.yaml.*{message}"):
        load_engine(str(path))
    path.write_text("\n".join(lines))
    assert load_engine(str(path)).layer == pytest.approx(-1 * US)


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="no engine 'best'; there are sglang, trtllm, vllm"):
        load_engine("best")


def test_a_datasheet_takes_no_dtype_that_its_device_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--datasheet", "a40-48gb", "--dtype", "fp8"]
    assert main(["profile", "demo", "-o", str(tmp_path / "p.json"), *words]) == 2
    assert "datasheet 'a40-48gb' has no fp8_flops: take another dtype" in capsys.readouterr().err


def test_auto_keeps_to_what_the_engine_schedules_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "llama-3.1-8b", "--datasheet", "h100-80gb", "--engine", "sglang", "-o", "p.json"]) == 0
    asked = ["optimize", "--profile", "p.json", "--workload", "azure-2023-conv", "--latency-bound", "20s", "--json"]
    capsys.readouterr()
    assert main(asked) == 0
    found = capsys.readouterr()
    assert {one["policy"] for one in json.loads(found.out)["candidates"]} == {"chunked", "rra", "sglang"}
    searched = "chunked, rra, sglang, waa-c"
    assert f"note: searched what sglang schedules by: {searched}; --policy NAME takes another" in found.err
    assert main([*asked, "--policy", "orca"]) == 0
    found = capsys.readouterr()
    assert {one["policy"] for one in json.loads(found.out)["candidates"]} == {"orca"}
    assert "searched what" not in found.err


@pytest.mark.parametrize("policies", ["chunked", "[chunked, fastest]", "3"])
def test_policies_of_an_engine_are_a_list_of_known_ones(policies: str, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(re.sub(r"policies: .*", f"policies: {policies}", shipped("engines", "vllm").read_text()))
    with pytest.raises(InputError, match="policies must be a list of some of chunked, concat, orca"):
        load_engine(str(path))


def test_an_imported_profile_takes_an_engine_and_no_second_overhead(
    profile: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    axes = ("op", "phase", "tensor_parallel_size", "num_seqs", "num_tokens", "context_tokens", "bytes", "seconds")
    lines = [",".join(str(getattr(m, axis) or "") for axis in axes) for m in profile.measurements]
    (tmp_path / "t.csv").write_text("\n".join([",".join(axes), *lines, ""]))
    command = ["profile", "import", str(tmp_path / "t.csv"), "--model", "demo", "--device", "cpu-generic"]
    command += ["--dtype", "float32", "-o", str(tmp_path / "p.json"), "--engine", "vllm"]
    assert main(command) == 0
    found = load_profile(tmp_path / "p.json")
    assert found.source == "imported csv with vllm"
    engine = load_engine("vllm")
    assert seconds(found, "rest", "decode")[0] == pytest.approx(60 * US + engine.layer)
    assert main([*command, "--overhead", "1ms"]) == 2
    assert "--engine says what the host takes; leave --overhead out" in capsys.readouterr().err


def test_an_engine_sums_small_tensors_by_kernels_of_its_own_and_large_ones_hardly_faster() -> None:
    sheet = datasheet_profile("llama-3.1-8b", "h100-80gb", tensor_parallel_sizes=(2, 8))
    before, after = (
        {(m.tensor_parallel_size, m.bytes): m.seconds for m in rows(p, "all_reduce", "intra")}
        for p in (sheet, with_engine(sheet, NEUTRAL))
    )
    assert before[8, 4096] > 14 * US
    assert 3 * US < after[8, 4096] < 6 * US, "vLLM's, SGLang's and TensorRT-LLM's: 3.5 to 5.6 us"
    assert 8 * US < after[8, 1 << 18] < 12 * US, "9.4 to 10.8 us"
    assert 0.9 * before[8, 1 << 28] < after[8, 1 << 28] <= before[8, 1 << 28]
    for size in (2, 8):
        times = [seconds for (degree, _), seconds in sorted(after.items()) if degree == size]
        assert times == sorted(times)


def test_sums_of_measured_kernels_are_not_replaced(profile: Profile) -> None:
    assert seconds(with_engine(profile, NEUTRAL), "all_reduce", "intra") == seconds(profile, "all_reduce", "intra")


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ("many", "defaults must be a list"),
        ("[{max_num_seqs: 3}]", "must name a policy"),
        ("[{policy: chunked, max_num_seqs: 3, max_num_batched_tokens: 64, gives_way: slots}]", "no 'slots'"),
        ("[{policy: chunked, max_num_seqs: 0, max_num_batched_tokens: 64}]", "max_num_seqs"),
        ("[{policy: chunked, max_num_seqs: 3, max_num_batched_tokens: 64, memory: much}]", "memory"),
    ],
)
def test_wrong_defaults_get_one_sentence(tmp_path: Path, defaults: str, message: str) -> None:
    text = shipped("engines", "trtllm").read_text()
    (tmp_path / "mine.yaml").write_text(f"{text}defaults: {defaults}\n")
    with pytest.raises(InputError, match=message):
        load_engine(str(tmp_path / "mine.yaml"))


def test_defaults_are_those_of_the_device() -> None:
    profiles = {name: datasheet_profile("qwen3-8b", name, engine="vllm") for name in ("a100-80gb", "h100-80gb")}
    found = {name: load_engine("vllm").defaults_on(profile.device) for name, profile in profiles.items()}
    budgets = {name: defaults and defaults.schedule["max_num_batched_tokens"] for name, defaults in found.items()}
    assert budgets == {"a100-80gb": 2048, "h100-80gb": 8192}
    assert load_engine("trtllm").defaults_on(profiles["h100-80gb"].device) is None
