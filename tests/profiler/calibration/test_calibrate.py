"""A few measured runs move a profile toward them, more of them further, and a file says what is wrong with it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from exeplan.api import datasheet_profile
from exeplan.cli import main
from exeplan.core.correction import Correction
from exeplan.core.models.model import load_model_sizes
from exeplan.core.profile import Measurement, Profile, load_profile, save_profile
from exeplan.errors import InputError
from exeplan.planner.margins.deployments import correction_law
from exeplan.profiler.calibration.calibrate import calibrate
from exeplan.profiler.calibration.law import placement_name, shipped_law
from exeplan.profiler.calibration.predict import predict_run
from exeplan.profiler.calibration.read_runs import Defaults, read_runs
from exeplan.profiler.calibration.serving_run import ServingRun
from exeplan.progress import Told

DEFAULTS = Defaults(engine="vllm", model="llama-3.1-8b", dtype="bfloat16", device="h100-80gb", tensor_parallel_size=1)
TRUTH = Correction(level=0.25, slope=0.05, prefill=0.1, first=0.1, first_seconds=0.005)


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


def test_a_run_on_several_workers_pays_their_control(runs: list[ServingRun]) -> None:
    profile = datasheet_profile("llama-3.1-8b", "h100-80gb", tensor_parallel_sizes=(2,), engine="vllm")
    control = Measurement(op="control", num_seqs=1, seconds=5e-3)
    run = replace(runs[0], tensor_parallel_size=2)
    before, after = (
        predict_run(replace(one, correction=None), run)
        for one in (profile, replace(profile, measurements=(*profile.measurements, control)))
    )
    assert after.tpot - before.tpot == pytest.approx(5e-3, rel=0.1)


def test_what_is_far_off_is_found_in_rounds(runs: list[ServingRun]) -> None:
    profile = datasheet_profile("llama-3.1-8b", "h100-80gb", tensor_parallel_sizes=(8,), engine="vllm")
    found = []
    for run in (replace(run, tensor_parallel_size=8) for run in runs):
        truth = predict_run(replace(profile, correction=Correction(links=1.2)), run)
        found.append(replace(run, ttft=truth.ttft, tpot=truth.tpot))
    for run, before, after in calibrate(profile, found).runs:
        assert before.tpot < 0.8 * run.tpot
        assert after.tpot == pytest.approx(run.tpot, rel=0.05)


def test_a_second_calibration_starts_from_the_same_times(profile: Profile, runs: list[ServingRun]) -> None:
    once = calibrate(profile, runs).profile
    assert calibrate(once, runs).profile == once


def test_each_replayed_run_is_told_with_the_share_that_is_done(profile: Profile, runs: list[ServingRun]) -> None:
    heard: list[tuple[str, float]] = []

    class Listener(Told):
        def __call__(self, title: str, share: float) -> None:
            heard.append((title, share))

    calibrate(profile, runs[:2], told=Listener())
    titles, shares = zip(*heard, strict=True)
    assert titles[:3] == ("round 1: run 1 of 2", "round 1: run 2 of 2", "round 2: run 1 of 2")
    assert titles[-1] == "predictions: run 2 of 2"
    assert list(shares) == sorted(set(shares))
    assert shares[-1] == 1.0


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


def test_a_run_on_devices_that_do_not_hold_its_weights_is_refused(runs: list[ServingRun]) -> None:
    large = datasheet_profile("llama-3.1-70b", "h100-80gb", tensor_parallel_sizes=(1, 8), engine="vllm")
    run = replace(runs[0], model=large.model.name, where="runs.csv line 2")
    message = r"^runs.csv line 2: .* in bfloat16 has 131.\d+ GiB of weights, which do not fit 1 x h100-80gb"
    with pytest.raises(InputError, match=message):
        calibrate(large, [run])
    assert calibrate(large, [replace(run, tensor_parallel_size=8)]).runs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # 6.98 G parameters in layers, 2 bytes each, at 3.35 TB/s; 2 x 6.98 G x 4096 operations at 989 TFLOP/s.
        (
            {"tpot": 3e-3},
            "3 ms is impossible: to read 13.00 GiB of weights takes 1 x h100-80gb at least 4.17 ms$",
        ),
        ({"tpot": 1e-5}, "10 us is impossible: .*; 1000 times as long would be possible: is its unit right"),
        ({"input_tokens": 4096, "ttft": 0.04}, "40 ms is impossible: to compute 4,096 tokens .* at least 57.8 ms"),
        ({"ttft": 0.003}, "ttft of 3 ms is impossible: to read "),
    ],
)
def test_a_run_faster_than_its_devices_is_refused(
    change: dict[str, float], message: str, profile: Profile, runs: list[ServingRun]
) -> None:
    with pytest.raises(InputError, match=message) as found:
        calibrate(profile, [replace(runs[0], **change)])  # type: ignore[arg-type]  # Fields by name.
    assert str(found.value).startswith(f"a run of {change.get('input_tokens', 256)} + 32 tokens, 2 clients: a t")


@pytest.mark.parametrize("field", ["ttft", "tpot"])
def test_a_time_in_another_unit_is_refused(field: str, profile: Profile, runs: list[ServingRun]) -> None:
    longer = [replace(run, **{field: 1000 * getattr(run, field)}) for run in runs]
    with pytest.raises(InputError, match=rf"a {field} of .* is \d+ times what is predicted, .*: is its unit right\?$"):
        calibrate(profile, longer)


def test_the_line_of_an_impossible_run_is_named(
    profile: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_profile(profile, tmp_path / "p.json")
    table = written(
        tmp_path / "runs.csv",
        "input_tokens,output_tokens,concurrency,ttft_ms,tpot_ms\n256,32,2,30,9\n256,32,2,0.03,0.009\n",
    )
    assert main(["calibrate", str(tmp_path / "p.json"), str(table)]) == 2
    assert f"{table} line 3: a tpot of 9 us is impossible" in capsys.readouterr().err
    assert load_profile(tmp_path / "p.json") == profile


def test_a_run_with_whole_experts_is_predicted_so_and_a_profile_without_them_refuses_it(
    runs: list[ServingRun], tmp_path: Path
) -> None:
    mixture = datasheet_profile("qwen3-30b-a3b", "h100-80gb", tensor_parallel_sizes=(4,), engine="trtllm")
    cut = replace(runs[0], engine="trtllm", model=mixture.model.name, tensor_parallel_size=4)
    whole = replace(cut, expert_parallel_size=4)
    assert predict_run(mixture, whole) != predict_run(mixture, cut)
    assert calibrate(mixture, [whole]).runs[0][1] == predict_run(mixture, whole)
    (tmp_path / "runs.csv").write_text(
        "tensor_parallel_size,expert_parallel_size,input_tokens,output_tokens,concurrency,ttft_s,tpot_s\n"
        f"4,4,256,32,2,{cut.ttft},{cut.tpot}\n4,,256,32,2,{cut.ttft},{cut.tpot}\n"
    )
    read = read_runs(tmp_path / "runs.csv", DEFAULTS).runs
    assert [run.expert_parallel_size for run in read] == [4, 1]
    with pytest.raises(InputError, match="expert_parallel_size 2 on 4 devices, for which the profile has 1, 4"):
        calibrate(mixture, [replace(cut, expert_parallel_size=2)])


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


VLLM = {
    "date": "20260301-120000",
    "endpoint_type": "vllm",
    "backend": "vllm",
    "label": None,
    "model_id": "meta-llama/Llama-3.1-8B-Instruct",
    "tokenizer_id": "meta-llama/Llama-3.1-8B-Instruct",
    "num_prompts": 10,
    "version": "0.12.0",
    "tensor_parallel_size": "1",
    "request_rate": "inf",
    "burstiness": 1.0,
    "max_concurrency": 4,
    "duration": 9.5,
    "completed": 10,
    "failed": 0,
    "total_input_tokens": 1000,
    "total_output_tokens": 500,
    "request_throughput": 1.05,
    "output_throughput": 52.6,
    "mean_ttft_ms": 50.0,
    "median_ttft_ms": 48.0,
    "p99_ttft_ms": 70.0,
    "mean_tpot_ms": 10.0,
    "mean_itl_ms": 10.0,
}
"""What `vllm bench serve --save-result --max-concurrency 4 --metadata version=0.12.0 tensor_parallel_size=1` writes."""


def guidellm_benchmark(strategy: dict[str, object], **means: float) -> dict[str, object]:
    """As in a report of guidellm 0.4 and later."""
    values = {"time_to_first_token_ms": 50.0, "inter_token_latency_ms": 10.0, "prompt_token_count": 100.2}
    values |= {"output_token_count": 49.9, "request_concurrency": 3.2, **means}
    totals = {"successful": 10, "incomplete": 0, "errored": 0, "total": 10}
    metrics: dict[str, object] = {name: {"successful": {"mean": value}} for name, value in values.items()}
    return {
        "type_": "generative_benchmark",
        "config": {"run_index": 0, "strategy": strategy},
        "metrics": {"request_totals": totals, **metrics},
    }


CONCURRENT = {"type_": "concurrent", "worker_count": 1, "max_concurrency": 4, "streams": 4}


def written(path: Path, body: object) -> Path:
    path.write_text(body if isinstance(body, str) else json.dumps(body))
    return path


def test_results_of_vllm_and_guidellm_are_read(tmp_path: Path) -> None:
    of_vllm = read_runs(written(tmp_path / "v.json", VLLM), DEFAULTS).runs
    report = {"metadata": {"version": 1}, "benchmarks": [guidellm_benchmark(CONCURRENT)]}
    of_guidellm = read_runs(written(tmp_path / "g.json", report), DEFAULTS).runs
    run = of_guidellm[0]
    assert (run.ttft, run.tpot, run.input_tokens, run.output_tokens) == (0.05, 0.01, 100, 50)
    assert (run.concurrency, run.num_requests, run.tensor_parallel_size) == (4, 10, 1)
    assert of_vllm == (replace(run, model="meta-llama/Llama-3.1-8B-Instruct", version="0.12.0"),)


@pytest.mark.parametrize(
    ("backend", "engine"),
    [
        ("sglang-oai-chat", "sglang"),
        ("trt", "trtllm"),
        ("tensorrt-llm", "trtllm"),
        ("openai", "vllm"),
        ("vllm", "vllm"),
        (None, "vllm"),
    ],
)
def test_a_backend_that_one_engine_has_says_the_engine(
    backend: str | None, engine: str, profile: Profile, tmp_path: Path
) -> None:
    path = written(tmp_path / "v.json", {**VLLM, "backend": backend})
    found = read_runs(path, DEFAULTS).runs
    assert found[0].engine == engine
    if engine != "vllm":
        with pytest.raises(InputError, match=f"with vllm', the runs are of {engine}$"):
            calibrate(profile, found)
    assert read_runs(path, replace(DEFAULTS, engine_stated=True)).runs[0].engine == "vllm"
    named = written(tmp_path / "n.json", {**VLLM, "backend": backend, "engine": "acme"})
    assert read_runs(named, DEFAULTS).runs[0].engine == "acme"


def test_results_that_vllm_appended_to_one_file_are_all_read(tmp_path: Path) -> None:
    lines = [json.dumps({**VLLM, "max_concurrency": clients}) for clients in (2, 4, 8)]
    found = read_runs(written(tmp_path / "v.json", "\n".join(lines)), DEFAULTS).runs
    assert [run.concurrency for run in found] == [2, 4, 8]


def test_a_sweep_s_runs_at_a_rate_are_left_out_with_a_remark(tmp_path: Path) -> None:
    kinds = [
        {"type_": "synchronous"},
        {"type_": "throughput", "max_concurrency": 512},
        {"type_": "constant", "rate": 3},
    ]
    body = {"benchmarks": [guidellm_benchmark(kind) for kind in kinds]}
    found = read_runs(written(tmp_path / "g.json", body), DEFAULTS)
    assert [run.concurrency for run in found.runs] == [1]
    assert ["benchmark 2 left out: 'throughput'" in found.remarks[0], "'constant'" in found.remarks[1]] == [True, True]
    with pytest.raises(InputError, match="only 2 at a rate; run guidellm with --profile concurrent"):
        read_runs(written(tmp_path / "g.json", {"benchmarks": body["benchmarks"][1:]}), DEFAULTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"request_rate": 4.0}, r"was sent at a rate \(request_rate 4.0\); comparable are runs without --request-rate"),
        ({"failed": 3}, "3 requests failed, 10 did not"),
        ({"max_concurrency": None}, "was not run with --max-concurrency"),
        ({"completed": 0}, "completed must be a number above 0"),
        ({"mean_tpot_ms": 0.0}, "tpot_ms must be a number above 0"),
        ({"total_output_tokens": 10}, r"run 1: output_tokens must be at least 2, found 1: .* has no tpot"),
        ({"total_input_tokens": "many"}, "total_input_tokens must be a number"),
    ],
)
def test_a_result_that_cannot_be_compared_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_runs(written(tmp_path / "v.json", {**VLLM, **change}), DEFAULTS)


def test_what_an_older_vllm_did_not_complete_counts_as_failed(tmp_path: Path) -> None:
    older = {name: value for name, value in VLLM.items() if name != "failed"}
    assert read_runs(written(tmp_path / "v.json", older), DEFAULTS).runs
    with pytest.raises(InputError, match="2 requests failed, 10 did not"):
        read_runs(written(tmp_path / "v.json", {**older, "num_prompts": 12}), DEFAULTS)


def test_a_result_of_another_model_is_refused_and_one_of_the_same_sizes_is_not(
    profile: Profile, tmp_path: Path
) -> None:
    for name, message in (("Qwen/Qwen3-8B", "a run is of model Qwen/Qwen3-8B"), ("served-name", None)):
        runs = read_runs(written(tmp_path / "v.json", {**VLLM, "model_id": name}), DEFAULTS).runs
        if message:
            with pytest.raises(InputError, match=message):
                calibrate(profile, runs)
        else:
            assert runs[0].model == "llama-3.1-8b"
    found = calibrate(profile, read_runs(written(tmp_path / "v.json", VLLM), DEFAULTS).runs)
    assert found.profile.correction
    assert found.profile.correction.own_runs == 1


def test_a_model_that_is_not_known_is_taken_for_the_profile_s_and_said_once_a_file(tmp_path: Path) -> None:
    lines = [json.dumps({**VLLM, "model_id": "acme/llama-70b-ft", "max_concurrency": clients}) for clients in (2, 4)]
    of_vllm = written(tmp_path / "v.json", "\n".join(lines))
    config = {"strategy": CONCURRENT, "backend": {"model": "acme/llama-70b-ft"}}
    of_guidellm = written(tmp_path / "g.json", {"benchmarks": [{**guidellm_benchmark(CONCURRENT), "config": config}]})
    for path in (of_vllm, of_guidellm):
        found = read_runs(path, DEFAULTS)
        assert {run.model for run in found.runs} == {"llama-3.1-8b"}
        said = f"{path}: model 'acme/llama-70b-ft' is not known here, and is taken for llama-3.1-8b"
        assert found.remarks == (said,)
    assert read_runs(written(tmp_path / "v.json", VLLM), DEFAULTS).remarks == ()


def test_a_report_of_another_model_says_whose_it_is(tmp_path: Path) -> None:
    config = {"strategy": CONCURRENT, "backend": {"model": "Qwen/Qwen3-8B"}}
    report = {"benchmarks": [{**guidellm_benchmark(CONCURRENT), "config": config}]}
    assert read_runs(written(tmp_path / "g.json", report), DEFAULTS).runs[0].model == "Qwen/Qwen3-8B"


def test_a_model_of_a_shipped_one_s_sizes_is_the_same_deployment() -> None:
    spec = load_model_sizes("Qwen/Qwen3-235B-A22B-FP8")
    named = placement_name(spec, engine="trtllm", device="h100-80gb", dtype="fp8", tensor_parallel_size=8)
    assert named in {one.name for one in shipped_law().evidence}


def test_a_run_that_waits_for_what_is_not_predicted_moves_little(profile: Profile, runs: list[ServingRun]) -> None:
    waiting = replace(runs[2], ttft=100 * runs[2].ttft)
    calm, outlier = (calibrate(profile, [*runs[:2], last]).profile.correction for last in (runs[2], waiting))
    assert calm
    assert outlier
    assert outlier.first_token(0.1) < 1.5 * calm.first_token(0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("input_tokens,output_tokens,concurrency,ttft_ms\n1,2,3,4\n", "no column tpot_ms or tpot_s or tpot_us"),
        ("input_tokens,output_tokens,concurrency,ttft_ms,tpot_ms\n1,2,x,4,5\n", "line 2: concurrency must be"),
        ("input_tokens,output_tokens,concurrency,ttft_ms,tpot_ms\n1,2.5,3,4,5\n", "output_tokens must be a whole"),
        (
            "input_tokens,output_tokens,concurrency,ttft_ms,tpot_ms\n1,1,3,4,5\n",
            "line 2: output_tokens must be at least 2",
        ),
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
