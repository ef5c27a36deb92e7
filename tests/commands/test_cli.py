"""The commands print what people and programs need, and answer every mistake with one sentence and exit status 2."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from exeplan.cli import main
from exeplan.core.plan import save_plan
from exeplan.core.profile import Profile, save_profile
from exeplan.errors import InputError
from exeplan.planner.load_problem import load_plan, plan_problem, read_plan
from exeplan.policies import policy_names

LAW = "normal:in=40,10,80;out=12,5,24"
BY_HAND = """
model: demo
schedule: {policy: rra, prefill_batch: 4, decode_steps: 6}
placement: [{devices: [0], layers: [0, 6]}]
"""
ESTIMATE = {
    "throughput",
    "token_throughput",
    "ttft",
    "tpot",
    "latency",
    "latency_p50",
    "latency_p99",
    "kv_tokens",
    "memory_bytes_per_gpu",
}


@pytest.fixture(autouse=True)
def _however_slow_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No search is long enough here for its progress to be shown."""
    monkeypatch.setattr("exeplan.progress._QUIET_SECONDS", math.inf)


@pytest.fixture
def folder(folder: Path) -> Path:
    """The working folder, with a profile and a plan that was written by hand."""
    (folder / "hand.yaml").write_text(BY_HAND)
    return folder


def optimize(**options: str) -> list[str]:
    """`exeplan optimize` with these options in place of good ones."""
    chosen = {"profile": "p.json", "workload": LAW, "latency_bound": "100ms", "policy": "orca", **options}
    return ["optimize", *(word for k, v in chosen.items() for word in (f"--{k.replace('_', '-')}", v))]


def simulate(plan: str = "hand.yaml", **options: str) -> list[str]:
    chosen = {"profile": "p.json", "workload": LAW, **options}
    return ["simulate", plan, *(word for k, v in chosen.items() for word in (f"--{k}", v))]


def answer(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """The one line on stderr of a command that is refused."""
    try:
        status: int | str | None = main(argv)
    except SystemExit as end:  # argparse ends by itself.
        status = end.code
    captured = capsys.readouterr()
    assert status == 2, captured.err
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.strip()


def printed(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def strict(text: str) -> dict[str, object]:
    body = json.loads(text, parse_constant=pytest.fail)
    assert isinstance(body, dict)
    return body


def test_optimize_prints_the_winner_and_every_policy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, optimize(policy="auto"))
    assert "bound 100 ms on p99-length" in text
    assert "drift headroom: the bound holds until outputs are" in text
    for word in (
        "throughput",
        "ttft",
        "tpot",
        "latency (bound)",
        "memory",
        "static",
        "orca",
        "rra",
        " points, ",
        " of computing",
    ):
        assert word in text


def test_an_option_that_changes_nothing_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*optimize(order="edf"), "--across-nodes", "--one-pipeline"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "note: --order edf changes nothing without a --deadline: all requests are as urgent, as with fcfs",
        "note: --across-nodes changes nothing without a --cluster or --gpus",
        "note: --one-pipeline changes nothing without a --cluster or --gpus",
    ]


def test_without_a_bound_none_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no latency bound: orca(" in printed(capsys, optimize(latency_bound="inf"))


@pytest.mark.parametrize("bound", ["100ms", "inf"])
def test_optimize_keeps_its_contract_with_programs(
    folder: Path, capsys: pytest.CaptureFixture[str], bound: str
) -> None:
    body = strict(printed(capsys, [*optimize(latency_bound=bound), "--json"]))
    assert set(body["schedule"]) == {"policy", "max_num_seqs"}  # type: ignore[call-overload]
    assert body["placement"] == [{"devices": [0], "tensor_parallel_size": 1, "layers": [0, 6]}]
    figures = ESTIMATE | (set() if bound == "inf" else {"attainment", "goodput"})
    assert set(body["estimate"]) == figures  # type: ignore[call-overload]
    assert set(body["replay"]) == figures  # type: ignore[call-overload]
    assert {"points", "seconds", "gap"} <= set(body["search"])  # type: ignore[call-overload]


def test_simulate_keeps_its_contract_with_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = strict(printed(capsys, [*simulate(), "--json"]))
    assert body["schedule"] == {"policy": "rra", "prefill_batch": 4, "decode_steps": 6}
    assert set(body["estimate"]) == set(body["replay"]) == ESTIMATE  # type: ignore[call-overload]


def test_the_papers_steady_state_changes_the_closed_form_and_not_the_replay(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = strict(printed(capsys, [*simulate(), "--json"]))
    paper = strict(printed(capsys, [*simulate(), "--steady-state", "paper", "--json"]))
    assert paper["replay"] == exact["replay"]
    assert paper["estimate"] != exact["estimate"]
    assert "exact steady state" in answer(capsys, [*simulate(), "--steady-state", "paper", "-o", "x.yaml"])
    assert not (folder / "x.yaml").exists()


def test_a_plan_that_optimize_wrote_replays_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "plans").mkdir()
    printed(capsys, [*optimize(memory="30MiB"), "-o", "plans/plan.yaml"])
    plan = load_plan(folder / "plans" / "plan.yaml")
    assert (plan.profile, plan.workload, plan.model) == ("../p.json", LAW, "demo")
    body = strict(printed(capsys, ["simulate", "plans/plan.yaml", "--json"]))
    assert plan.replay is not None
    assert body["replay"]["throughput"] == plan.replay.throughput  # type: ignore[index]
    assert body["replay"]["latency"] == plan.replay.latency  # type: ignore[index]


def test_simulate_fills_in_a_plan_by_hand(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, [*simulate(), "-o", "full.yaml", "--timeline", "t.json"])
    assert "closed form" in text
    assert "replay" in text
    assert text.endswith("wrote t.json\nwrote full.yaml\n")
    assert strict((folder / "t.json").read_text())["traceEvents"]
    plan = load_plan(folder / "full.yaml")
    assert plan.estimate is not None
    assert plan.replay is not None
    assert plan.estimate.throughput == pytest.approx(plan.replay.throughput, rel=0.1)
    assert strict(printed(capsys, ["simulate", "full.yaml", "--json"]))["schedule"]


def test_simulate_takes_the_plans_own_kv_cache(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "hand.yaml").write_text(BY_HAND + "kv_cache_tokens: 160\n")
    body = strict(printed(capsys, [*simulate(), "--json"]))
    assert body["replay"]["kv_tokens"] <= 160  # type: ignore[index]
    assert body["kv_cache_tokens"] == 160


def test_a_replay_that_breaks_the_bound_ends_with_status_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "hand.yaml").write_text(BY_HAND + "bound: {seconds: 0.001}\n")
    assert main(simulate()) == 2
    assert "the replay breaks the bound 1 ms on p99-length" in capsys.readouterr().out
    assert main([*simulate(), "--json"]) == 2
    assert strict(capsys.readouterr().out)["broken_bound"] == {"seconds": 0.001, "about": "p99-length"}
    (folder / "hand.yaml").write_text(BY_HAND + "bound: {seconds: 10}\n")
    assert strict(printed(capsys, [*simulate(), "--json"]))["broken_bound"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"latency_bound": "-1s"}, "--latency-bound must be above zero, found '-1s'"),
        ({"latency_bound": "-1"}, "--latency-bound must be above zero, found '-1'"),
        ({"latency_bound": "0"}, "--latency-bound must be above zero, found '0'"),
        ({"latency_bound": "nan"}, "--latency-bound must be above zero, found 'nan'"),
        ({"latency_bound": "soon"}, "--latency-bound must be a duration such as 2s, 500ms or 1m, found 'soon'"),
        ({"latency_bound": "1ms"}, "latency bound 1 ms, but the lowest-latency schedule, orca(max_num_seqs=1), needs"),
        ({"policy": "best"}, f"no policy 'best'; there are {', '.join(policy_names())}"),
        ({"order": "best"}, "no order 'best'; there are fcfs, sjf, edf, das"),
        ({"method": "guess"}, "no search method 'guess'; there are branch-and-bound, exhaustive, bayesian"),
        (
            {"bound_on": "p50"},
            "--bound-on must be p99-length or pNN-requests, such as p99-requests or p50-requests, found 'p50'",
        ),
        (
            {"memory": "1MB"},
            "demo needs 21.7 MiB for weights, workspace and one request of 104 tokens; affine has 1.0 MiB for it",
        ),
        ({"memory": "500GiB"}, "--memory is of each device, and affine has "),
        ({"memory": "-1MB"}, "--memory must be above zero, found '-1MB'"),
        ({"max_num_seqs": "0"}, "--max-num-seqs must lie between 1 and 65536, found 0"),
        ({"max_num_seqs": "1000000000"}, "--max-num-seqs must lie between 1 and 65536, found 1000000000"),
        ({"max_num_seqs": "many"}, "argument --max-num-seqs: invalid int value: 'many'"),
        ({"profile": "nothing.json"}, "no file nothing.json"),
        ({"profile": "half.json"}, "half.json is not valid JSON:"),
        ({"profile": "noise"}, "noise is not UTF-8 text"),
        ({"profile": "hand.yaml"}, "hand.yaml is not valid JSON:"),
        ({"profile": "object.json"}, "object.json is not an exeplan profile; make one with `exeplan profile MODEL"),
        ({"model": "llama-50m"}, "the profile is of demo, whose sizes (fingerprint "),
        ({"model": "nope"}, "no model directory or shipped model 'nope'; shipped are"),
        ({"workload": "nothing.csv"}, "no workload 'nothing.csv': no such file, no law"),
        ({"workload": "empty.csv"}, "empty.csv holds no request; a trace needs at least one row below the header"),
        ({"workload": "half.csv"}, "half.csv line 3: 1 fields, the header has 2"),
        ({"workload": "noise"}, "noise is not UTF-8 text"),
        (
            {"workload": "fixed:in=600;out=500"},
            "workload 'fixed:in=600;out=500' has requests of 1100 tokens, the context of demo is 1024",
        ),
        ({"plot": "frontier.gif"}, "cannot draw frontier.gif"),
    ],
)
def test_optimize_answers_a_mistake_in_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], options: dict[str, str], message: str
) -> None:
    (folder / "half.json").write_text((folder / "p.json").read_text()[:3000])
    (folder / "object.json").write_text("{}")
    (folder / "noise").write_bytes(b"\xfe\xff\x00\x80" * 9)
    (folder / "empty.csv").write_text("input_tokens,output_tokens\n")
    (folder / "half.csv").write_text("input_tokens,output_tokens\n10,5\n10")
    assert answer(capsys, optimize(**options)).startswith(f"exeplan optimize: {message}")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (simulate("nothing.yaml"), "no file nothing.yaml"),
        (simulate("."), ". is a directory, not a file"),
        (simulate("p.json"), "p.json: unknown field 'calibration'; a plan has"),
        (simulate("half.yaml"), "half.yaml is not valid YAML: expected"),
        (
            simulate("other.yaml"),
            "the plan was made for a model of other sizes (fingerprint 0000000000000000) than demo has (",
        ),
        (simulate("layers.yaml"), "the plan places layers [0, 5]; demo needs 0 to 6 in order"),
        (simulate("two.yaml"), "the profile has tensor-parallel sizes 1, not 2"),
        (simulate("no-model.yaml"), "no model directory or shipped model 'nope'; shipped are"),
        (["simulate", "hand.yaml"], "the plan names no profile; give one with --profile"),
        (["simulate", "hand.yaml", "--profile", "p.json"], "the plan names no workload; give one with --workload"),
        (simulate(workload="fixed:in=600;out=500"), "workload 'fixed:in=600;out=500' has requests of 1100 tokens"),
        (simulate(requests="0"), "--requests must lie between 1 and 10000000, found 0"),
        (simulate(requests="10000000000"), "--requests must lie between 1 and 10000000, found 10000000000"),
        (simulate(seed="-1"), "--seed must be at least 0, found -1"),
        (simulate(timeline="t.gif"), "a timeline is a .json, .png, .svg or .pdf file, not 't.gif'"),
        (simulate("small.yaml"), "40 prompt and 24 output tokens need 4 KV blocks, the cache has 1 (16 tokens)"),
        (["simulate"], "the following arguments are required: PLAN; see `exeplan simulate --help`"),
    ],
)
def test_simulate_answers_a_mistake_in_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    (folder / "half.yaml").write_text(BY_HAND[:60])
    (folder / "other.yaml").write_text(BY_HAND + "model_fingerprint: '0000000000000000'\n")
    (folder / "layers.yaml").write_text(BY_HAND.replace("[0, 6]", "[0, 5]"))
    (folder / "two.yaml").write_text(BY_HAND.replace("[0], layers", "[0, 1], layers"))
    (folder / "no-model.yaml").write_text(BY_HAND.replace("demo", "nope"))
    (folder / "small.yaml").write_text(BY_HAND + "kv_cache_tokens: 16\nworkload: fixed:in=40;out=24\n")
    argv = [word for word in argv if argv[1:2] != ["small.yaml"] or word not in ("--workload", LAW)]
    assert answer(capsys, argv).startswith(f"exeplan simulate: {message}")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "exeplan: the following arguments are required: COMMAND; see `exeplan --help`"),
        (["optimise"], "exeplan: argument COMMAND: invalid choice: 'optimise'"),
        (["serve", "nothing.yaml"], "exeplan serve: no file nothing.yaml"),
        (["serve", "hand.yaml", "--port", "99999"], "exeplan serve: --port must lie between 0 and 65535, found 99999"),
        (["serve", "hand.yaml", "--drain", "-1s"], "exeplan serve: --drain must be above zero, found '-1s'"),
        (["bench"], "exeplan bench: give a PLAN, or a URL and --workload"),
        (["bench", "http://a:1", "--url", "http://b:2"], "exeplan bench: two servers were given, http://a:1 and http"),
        (["bench", "http://127.0.0.1:1"], "exeplan bench: give a PLAN, or a URL and --workload"),
        (
            ["bench", "http://127.0.0.1:1", "--workload", LAW],
            "exeplan bench: http://127.0.0.1:1/v1/models does not",
        ),
        (["bench", "hand.yaml", "--fit-context"], "exeplan bench: --fit-context goes with URL; a plan states what"),
        (["bench", "http://a:1", "--timeline", "t.json"], "exeplan bench: --timeline goes with PLAN, whose passes are"),
        (
            ["bench", "hand.yaml", "--timeline", "t.gif"],
            "exeplan bench: a timeline is a .json, .png, .svg or .pdf file",
        ),
        (["bench", "hand.yaml", "--timeline", "p.json/t.json"], "exeplan bench: cannot write p.json/t.json: "),
        (["bench", "hand.yaml", "--engine-timeline", "p.json/t.json"], "exeplan bench: cannot write p.json/t.json: "),
        (
            ["drift", "t.csv", "--plan", "hand.yaml", "-o", "p.json/d.yaml"],
            "exeplan drift: cannot write p.json/d.yaml: ",
        ),
        (["calibrate", "p.json", "runs.csv", "-o", "p.json/c.json"], "exeplan calibrate: cannot write p.json/c.json: "),
        (["profile", "demo", "-o", "p.json/x.json"], "exeplan profile: cannot write p.json/x.json: "),
        (["profile", "demo", "--engine", "vllm", "-o", "."], "exeplan profile: cannot write .: it is a directory"),
        (
            ["watch", "hand.yaml", "--engine=vllm", "--model=m", "--metrics=http://a:1", "-o", "p.json/w.yaml"],
            "exeplan watch: cannot write p.json/w.yaml: ",
        ),
        (
            ["bench", "hand.yaml", "--url", "http://a:1", "--engine-timeline", "t.json"],
            "exeplan bench: --engine-timeline goes with PLAN alone; the engine is the server's",
        ),
        (
            ["bench", "hand.yaml", "--workload", LAW, "--timeline", "t.json"],
            "exeplan bench: --timeline writes predicted passes, and the plan has no profile; give --profile",
        ),
        (["bench", "hand.yaml"], "exeplan bench: the plan names no workload; give one with --workload"),
        (["bench", "hand.yaml", "--rate", "-2"], "exeplan bench: --rate must be above zero, found -2.0"),
        (["bench", "hand.yaml", "--rate", "nan"], "exeplan bench: --rate must be above zero, found nan"),
        (
            ["bench", "hand.yaml", "--workload", LAW, "--duration", "inf"],
            "exeplan bench: --duration must be at most 30 days (720h), found 'inf'",
        ),
        (
            ["optimize", "--workload", LAW, "--latency-bound", "inf", "--model", "demo"],
            "exeplan optimize: give --profile FILE, as `exeplan profile` makes it; or --model and --cluster",
        ),
        (["profile", "nope", "-o", "x.json"], "exeplan profile: no model directory or shipped model 'nope'"),
        (["profile", "demo", "-o", "x.json", "--budget", "0"], "exeplan profile: --budget must be above zero"),
        (
            ["profile", "demo", "-o", "x.json", "--budget", "inf"],
            "exeplan profile: --budget must be at most 30 days (720h), found 'inf'",
        ),
        (
            ["profile", "demo", "-o", "x.json", "--engine", "vllm", "--budget", "inf"],
            "exeplan profile: --budget must be at most 30 days (720h), found 'inf'",
        ),
        (["profile", "demo", "-o", "x.json", "--threads", "0"], "exeplan profile: --threads must be at least 1"),
        (["profile", "demo", "-o", "x.json", "--device", "cpu", "--dtype", "fp8"], "exeplan profile: fp8 needs a GPU"),
        (
            ["profile", "demo", "-o", "x.json", "--device", "cpu", "--kv-dtype", "fp8"],
            "exeplan profile: fp8 needs a GPU",
        ),
    ],
)
def test_the_other_commands_answer_a_mistake_in_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert answer(capsys, argv).startswith(message)


def test_a_model_that_does_not_run_here_is_refused_without_a_note(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "phi3", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config |= {"intermediate_size": 64, "vocab_size": 300, "max_position_embeddings": 128, "sliding_window": 64}
    (folder / "config.json").write_text(json.dumps(config))
    refusal = answer(capsys, ["profile", ".", "-o", "x.json"])
    assert refusal.startswith("exeplan profile: no model family 'phi3' is run; there are")


def test_without_a_profile_times_are_those_of_the_clusters_datasheet(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--workload", LAW, "--latency-bound", "inf", "--policy", "orca", "--max-num-seqs", "8"]
    by_datasheet = ["optimize", "--model", "mixtral-8x7b", "--cluster", "h100", "--gpus", "2", *asked]
    assert main([*by_datasheet, "-o", "plan.yaml"]) == 0
    told = capsys.readouterr()
    assert "note: 32 of 32 layers of 'mixtral-8x7b' send each token to 2 of 8 experts" in told.err
    assert "note: a datasheet takes all experts to be as likely, unless --routing says otherwise\n" in told.err
    assert "note: times are of the datasheet h100-80gb, links of cluster h100; a profile that was measured" in told.err
    assert told.out.endswith("plan written to plan.yaml; run it with `exeplan serve plan.yaml`\n")
    assert main(["profile", "mixtral-8x7b", "--datasheet", "h100-80gb", "--cluster", "h100", "-o", "m.json"]) == 0
    same = ["optimize", "--profile", "m.json", "--cluster", "h100", "--gpus", "2", *asked, "-o", "same.yaml"]
    assert main(same) == 0
    plans = [load_plan(folder / name) for name in ("plan.yaml", "same.yaml")]
    assert plans[0].estimate == plans[1].estimate
    assert plans[0].profile is None
    assert main([*by_datasheet, "--engine", "vllm", "-o", "vllm.yaml"]) == 0
    assert load_plan(folder / "vllm.yaml").estimate.throughput != plans[0].estimate.throughput
    assert "corrected by measured serving runs: passes of 16 rows" in capsys.readouterr().out
    refused = "exeplan optimize: --engine goes with the times of a datasheet; give it to `exeplan profile` instead"
    assert answer(capsys, [*same, "--engine", "vllm"]) == refused


def test_a_plan_without_a_profile_replays_with_the_times_of_the_datasheet_that_it_was_made_with(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--workload", LAW, "--latency-bound", "inf", "--policy", "orca", "--max-num-seqs", "8"]
    by_datasheet = ["optimize", "--model", "llama-3.1-8b", "--cluster", "h100", "--gpus", "1", *asked]
    assert main([*by_datasheet, "-o", "plan.yaml"]) == 0
    assert main([*by_datasheet, "--engine", "vllm", "-o", "vllm.yaml"]) == 0
    plan = load_plan(folder / "vllm.yaml")
    assert (load_plan(folder / "plan.yaml").engine, plan.engine) == (None, "vllm")
    for name in ("plan.yaml", "vllm.yaml"):
        assert main(["simulate", name, "-o", "again.yaml"]) == 0
        again, before = load_plan(folder / "again.yaml"), load_plan(folder / name)
        assert (again.estimate, again.engine) == (before.estimate, before.engine)
    capsys.readouterr()
    save_plan(replace(plan, engine=None, kv_dtype="fp8"), folder / "other.yaml")
    made = "`exeplan profile llama-3.1-8b --datasheet h100-80gb --cluster h100 --dtype bfloat16 --kv-dtype fp8 -o"
    assert made in answer(capsys, ["simulate", "other.yaml"])
    save_plan(replace(plan, profile_fingerprint="0123456789abcdef"), folder / "other.yaml")
    assert "--dtype bfloat16 --engine vllm -o profile.json` makes it)" in answer(capsys, ["simulate", "other.yaml"])


def test_a_share_of_each_gpu_is_what_a_plan_may_use(
    folder: Path, profile: Profile, capsys: pytest.CaptureFixture[str]
) -> None:
    save_profile(replace(profile, device=replace(profile.device, kind="cuda")), folder / "gpu.json")
    asked = {"profile": "gpu.json", "gpu_memory_utilization": "0.05"}
    assert main([*optimize(**asked), "-o", "plan.yaml"]) == 0
    plan = load_plan(folder / "plan.yaml")
    assert plan.gpu_memory_utilization == 0.05
    assert plan_problem(read_plan(folder / "plan.yaml")).memory == 0.05 * profile.device.memory_bytes
    capsys.readouterr()
    message = "exeplan optimize: --gpu-memory-utilization is for GPUs, the profile is of a CPU; use --memory"
    assert answer(capsys, optimize(gpu_memory_utilization="0.05")) == message
    share = "is a share of the GPU's memory above 0 and at most 1, found 1.5"
    assert share in answer(capsys, optimize(profile="gpu.json", gpu_memory_utilization="1.5"))
    assert "is for GPUs" in answer(capsys, ["serve", "hand.yaml", "--gpu-memory-utilization", "0.5"])


def test_the_exit_status_reaches_the_shell_without_a_traceback(folder: Path) -> None:
    command = [sys.executable, "-m", "exeplan"]
    wrong = subprocess.run([*command, *optimize(latency_bound="-1s")], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "exeplan optimize: --latency-bound must be above zero, found '-1s'\n"
    right = subprocess.run([*command, *optimize(), "--json"], capture_output=True, text=True, check=False)
    assert (right.returncode, right.stderr) == (0, "")
    assert strict(right.stdout)["schedule"]


def test_json_names_the_inputs_of_a_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([*optimize(), "--json"], [*optimize(), "--json", "-o", "plan.yaml"], [*simulate(), "--json"]):
        assert main(argv) == 0
        body = json.loads(capsys.readouterr().out)
        assert (body["workload"], body["profile"]) == (LAW, "p.json")
    assert main(["simulate", "plan.yaml", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["workload"], Path(body["profile"]).name) == (LAW, "p.json")


def test_a_long_replay_says_how_far_it_is(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exeplan.progress._QUIET_SECONDS", 0.0)
    monkeypatch.setattr("exeplan.progress._DRAW_SECONDS", 0.0)
    monkeypatch.setattr("exeplan.progress._LINE_SECONDS", 0.0)
    assert main([*simulate(), "--requests", "500"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"simulate: \d %(, about .* left)?; replay", lines[0])
    assert lines[-1] == "simulate: 100 %, about 0 s left; replay"


@pytest.mark.parametrize(
    "argv",
    [
        [*optimize(), "-o", "p.json/plan.yaml"],
        [*optimize(), "--plot", "p.json/frontier.png"],
        [*simulate(), "-o", "p.json/plan.yaml"],
        [*simulate(), "--timeline", "p.json/t.json"],
        ["compare", "--profile", "p.json", "--workload", LAW, "--latency-bound", "1s", "--csv", "p.json/rows.csv"],
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    for name in ("optimize", "simulate", "compare"):
        monkeypatch.setattr(f"exeplan.api.{name}", pytest.fail)
    place = folder / "p.json"
    assert answer(capsys, argv) == f"exeplan {argv[0]}: cannot write {argv[-1]}: {place} is not a directory"


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_what_was_found_is_printed_where_a_file_cannot_be_written(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    def full(figure: object, path: Path) -> None:
        raise InputError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr("exeplan.planner.reports.frontier_plot.save_figure", full)
    assert main([*optimize(), "--plot", "f.png", "-o", "plan.yaml", *more]) == 2
    captured = capsys.readouterr()
    assert captured.err == "exeplan optimize: cannot write f.png: No space left on device\n"
    assert "orca" in captured.out
    assert ("plan written to plan.yaml" in captured.out) is not bool(more)
    assert "f.png" not in captured.out
    assert load_plan(folder / "plan.yaml").schedule.policy == "orca"


def test_a_plan_for_a_backlog_is_replayed_at_a_rate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*simulate(), "--arrival-rate", "20", "-o", "at-rate.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "full batches: " in shown
    saved = load_plan(folder / "at-rate.yaml")
    assert saved.arrival_rate == 20
    assert saved.replay is not None
    assert saved.replay.throughput == pytest.approx(20, rel=0.05)
    assert saved.rate_headroom is not None
    # What it was saved for is what it is replayed for, until another rate is given.
    assert main(["simulate", "at-rate.yaml", "--profile", "p.json", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["arrival_rate"], again["replay"]) == (20, saved.replay.to_dict())
    assert main(["simulate", "at-rate.yaml", "--profile", "p.json", "--arrival-rate", "10", "--json"]) == 0
    slower = json.loads(capsys.readouterr().out)
    assert slower["replay"]["ttft"] < again["replay"]["ttft"]


def test_what_was_done_to_a_workload_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"conversations": [{"from": "human", "value": "a" * 80}, {"from": "gpt", "value": "b" * 24}]}
    (folder / "t.json").write_text(json.dumps([row, {"conversations": []}, row]))
    source = (
        "t.json, 2 requests; a trace of ShareGPT; tokens estimated as bytes of text / 4, no tokenizer was given; "
        "1 without input or output left out"
    )
    for argv in (optimize(workload="t.json"), simulate(workload="t.json")):
        assert source in printed(capsys, argv)
        assert strict(printed(capsys, [*argv, "--json"]))["workload_source"] == source
        argv[argv.index("t.json")] = LAW
        assert strict(printed(capsys, [*argv, "--json"]))["workload_source"] is None


def test_a_plan_is_replayed_at_the_times_of_a_trace(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"{number / 10},20,6\n" for number in range(200))
    (folder / "trace.csv").write_text(f"arrival_s,input_tokens,output_tokens\n{rows}")
    assert main([*simulate(workload="trace.csv"), "--arrivals", "trace", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["trace_arrivals"] is True
    assert body["replay"]["throughput"] == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arrivals", "trace"], "has no arrival times; give an arrival rate instead"),
        (["--arrival-rate", "-1"], "--arrival-rate must be a positive number of requests a second, found '-1'"),
        (["--arrival-rate", "9", "--arrivals", "trace"], "not allowed with argument"),
        (["--arrival-rate", "1e6"], "1e+06 requests/s (Poisson) come"),
    ],
)
def test_a_rate_that_cannot_be_replayed_is_refused(
    options: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in answer(capsys, [*simulate(), *options])
