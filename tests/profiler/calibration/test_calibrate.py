"""A few measured runs move a profile toward them, more of them further, and a file says what is wrong with it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from exeplan.api import datasheet_profile
from exeplan.cli import main
from exeplan.core.correction import Correction
from exeplan.core.profile import Profile, load_profile, save_profile
from exeplan.errors import InputError
from exeplan.planner.deployments import correction_law
from exeplan.profiler.calibration.calibrate import calibrate
from exeplan.profiler.calibration.predict import predict_run
from exeplan.profiler.calibration.read_runs import Defaults, read_runs
from exeplan.profiler.calibration.serving_run import ServingRun

DEFAULTS = Defaults(engine="vllm", model="llama-3.1-8b", dtype="bfloat16", device="h100-80gb", tensor_parallel_size=1)
TRUTH = Correction(level=0.25, slope=0.05, prefill=0.1, first=0.2)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return datasheet_profile("llama-3.1-8b", "h100-80gb", tensor_parallel_sizes=(1,), engine="vllm")


@pytest.fixture(scope="module")
def runs(profile: Profile) -> list[ServingRun]:
    """As they would be measured where the truth is another correction."""
    found = []
    for concurrency in (2, 4, 8):
        run = ServingRun(
            engine="vllm",
            model="llama-3.1-8b",
            dtype="bfloat16",
            device="h100-80gb",
            tensor_parallel_size=1,
            input_tokens=256,
            output_tokens=32,
            concurrency=concurrency,
            ttft=1.0,
            tpot=1.0,
        )
        truth = predict_run(replace(profile, correction=TRUTH), run)
        found.append(replace(run, ttft=truth.ttft, tpot=truth.tpot))
    return found


def test_three_runs_move_the_prediction_toward_them(profile: Profile, runs: list[ServingRun]) -> None:
    found = calibrate(profile, runs)
    for run, before, after in found.runs:
        assert abs(after.tpot / run.tpot - 1) < 0.3 * abs(before.tpot / run.tpot - 1)
        assert abs(after.e2e(run) / run.e2e - 1) < 0.05
    correction, shipped = found.profile.correction, profile.correction
    assert correction
    assert shipped
    assert correction.own_runs == 3
    assert correction.spreads["tpot"] < shipped.spreads["tpot"]
    assert "3 measured runs of this deployment" in correction.said


def test_a_second_calibration_starts_from_the_same_times(profile: Profile, runs: list[ServingRun]) -> None:
    once = calibrate(profile, runs).profile
    assert calibrate(once, runs).profile == once


def test_a_law_after_correction_is_narrower_with_own_runs(profile: Profile, runs: list[ServingRun]) -> None:
    corrections = profile.correction, calibrate(profile, runs).profile.correction
    unseen, seen = (correction_law(one, "tpot").margin(0.05) for one in corrections if one)
    assert 0 < seen < unseen


def test_nothing_comparable_is_said_instead_of_a_margin() -> None:
    with pytest.raises(InputError, match="nothing comparable was measured"):
        correction_law(Correction(spreads={"tpot": 0.1}, shared=("kind",)), "tpot")


def test_runs_of_another_engine_or_size_are_refused(profile: Profile, runs: list[ServingRun]) -> None:
    with pytest.raises(InputError, match="the profile is 'datasheet h100-80gb with vllm', the runs are of sglang"):
        calibrate(profile, [replace(runs[0], engine="sglang")])
    with pytest.raises(InputError, match="tensor_parallel_size 8, the profile has 1"):
        calibrate(profile, [replace(runs[0], tensor_parallel_size=8)])
    with pytest.raises(InputError, match=r"a run is of model opt-13b, the profile of .*; where another name means"):
        calibrate(profile, [replace(runs[0], model="opt-13b")])
    with pytest.raises(InputError, match="no measured run"):
        calibrate(profile, [])


def test_the_command_reads_a_table_and_writes_a_profile(
    profile: Profile, runs: list[ServingRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_profile(profile, tmp_path / "p.json")
    lines = [f"1,256,32,{r.concurrency},{1e3 * r.ttft},{r.tpot}" for r in runs]
    header = "tensor_parallel_size,input_tokens,output_tokens,concurrency,ttft_ms,tpot_s"
    (tmp_path / "runs.csv").write_text("\n".join([header, *lines, ""]))
    out = tmp_path / "calibrated.json"
    assert main(["calibrate", str(tmp_path / "p.json"), str(tmp_path / "runs.csv"), "-o", str(out)]) == 0
    assert "corrected by measured serving runs" in capsys.readouterr().out
    correction = load_profile(out).correction
    assert correction
    assert correction.own_runs == 3


def test_results_of_vllm_and_guidellm_are_read(tmp_path: Path) -> None:
    vllm = {"mean_ttft_ms": 50, "mean_tpot_ms": 10, "total_input_tokens": 1000, "total_output_tokens": 500}
    (tmp_path / "v.json").write_text(json.dumps({**vllm, "completed": 10, "max_concurrency": 4}))
    means = {"time_to_first_token_ms": 50, "inter_token_latency_ms": 10, "prompt_token_count": 100.2}
    means |= {"output_token_count": 49.9, "request_concurrency": 3.98}
    metrics = {name: {"successful": {"mean": value}} for name, value in means.items()}
    (tmp_path / "g.json").write_text(json.dumps({"benchmarks": [{"metrics": metrics}]}))
    of_vllm, of_guidellm = (read_runs(tmp_path / name, DEFAULTS) for name in ("v.json", "g.json"))
    assert of_vllm == of_guidellm
    run = of_vllm[0]
    assert (run.ttft, run.tpot, run.input_tokens, run.output_tokens, run.concurrency) == (0.05, 0.01, 100, 50, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("input_tokens,output_tokens,concurrency,ttft_ms\n1,2,3,4\n", "no column tpot_ms or tpot_s or tpot_us"),
        ("input_tokens,output_tokens,concurrency,ttft_ms,tpot_ms\n1,2,x,4,5\n", "line 2: concurrency must be"),
        ("input_tokens,output_tokens,concurrency,ttft_ms,tpot_ms\n1,2.5,3,4,5\n", "output_tokens must be a whole"),
        ("input_tokens,output_tokens,concurrency,ttft_ms,tpot_ms\n1,2,3,0,5\n", "ttft_ms must be a number above 0"),
        ("{}", "no result of `vllm bench serve --save-result` or guidellm, lacks mean_ttft_ms"),
        ("{", "line 1 is not valid JSON"),
    ],
)
def test_a_wrong_file_is_named_by_its_line_and_field(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "runs"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_runs(path, DEFAULTS)
