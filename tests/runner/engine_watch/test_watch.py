"""`exeplan watch` proposes another plan when another engine's traffic has changed, and never on unchanged traffic."""

import json
import re
import socket
import threading
import time
import urllib.request
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from exeplan.cli import main
from exeplan.core.bounds import Bound
from exeplan.core.plan import save_plan
from exeplan.core.profile import load_profile, save_profile
from exeplan.core.schedule import ReplicaGroup
from exeplan.drift.state import Rules
from exeplan.errors import InputError
from exeplan.export.interface import Export
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.load_problem import plan_sizes, read_plan
from exeplan.planner.problems.problem import make_problem
from exeplan.runner.engine_watch.dashboard import SidecarMetrics, grafana_dashboard
from exeplan.runner.engine_watch.readings import read
from exeplan.runner.engine_watch.sidecar import Server, Sidecar
from exeplan.vllm_plugin.cadence import Cadence
from exeplan.workload.files import load_workload
from tests.runner.engine_watch.served import Engine, shown

BOUND = 0.45
EVERY = 4.0


def requests(count: int, seed: int, *, scale: float = 1.0) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    outputs = np.minimum((rng.gamma(2.0, 30.0, count) * scale).astype(int) + 1, 400)
    return list(zip(rng.integers(8, 60, count).tolist(), outputs.tolist(), strict=True))


def write_trace(folder):
    rows = "\n".join(f"{i},{o}" for i, o in requests(4000, 99))
    (folder / "planned.csv").write_text(f"input_tokens,output_tokens\n{rows}\n")
    return folder / "planned.csv"


@pytest.fixture(scope="module")
def planned(profile, tmp_path_factory):
    """The plan of a policy; each is searched for once."""
    workload = load_workload(str(write_trace(tmp_path_factory.mktemp("planned"))))

    @cache
    def plan(policy: str):
        found = optimize(make_problem(profile, workload, Bound(seconds=BOUND)), policies=(policy,)).plan
        return replace(found, profile="p.json", workload="planned.csv", device="cpu", num_threads=1)

    return plan


@pytest.fixture
def make_plan(folder, profile, planned):
    """Writes a plan of a policy, with its trace and its profile, and returns its file."""

    def make(policy: str):
        write_trace(folder)
        save_profile(replace(profile, source="datasheet with vllm"), folder / "p.json")
        save_plan(planned(policy), folder / "plan.yaml")
        return folder / "plan.yaml"

    return make


def sidecar(file, *, plug_in: bool) -> Sidecar:
    plan = read_plan(file)
    output = file.with_name("next.yaml")
    server = Server(engine="vllm", model="organisation/name", plug_in=plug_in, file=file, output=output)
    policies = ("rra",) if plug_in else ("chunked", "orca")
    return Sidecar(plan, server, plan_sizes(plan), rules=Rules(every=EVERY, dwell=8.0), policies=policies)


def play(watch: Sidecar, engine: Engine, traffic, *, begin: float = 0.0, each: int = 40):
    """A reading after so many requests each; all looks."""
    looks = []
    with shown(engine) as url:
        for number in range(0, len(traffic) + 1, each):
            looks.append(watch.take(begin + EVERY * number / each, read("vllm", [url])))
            engine.end(traffic[number : number + each])
    return looks


def remarks(looks) -> str:
    return "\n".join(remark for look in looks for remark in look.remarks)


@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_proposed_on_unchanged_traffic(make_plan, seed):
    watch = sidecar(make_plan("chunked"), plug_in=False)
    looks = play(watch, Engine(), requests(1600, seed))
    assert not watch.server.output.exists()
    assert max(look.state.measure for look in looks) < 1
    assert looks[-1].state.num_requests > 300


def test_a_better_plan_is_written_with_its_command_once(make_plan):
    watch = sidecar(make_plan("chunked"), plug_in=False)
    looks = play(watch, Engine(), requests(1600, 1, scale=2.0))
    said = remarks(looks)
    assert said.count("wrote ") == 1
    assert looks[-1].state.measure > 1
    proposed, before = read_plan(watch.server.output), read_plan(watch.server.file)
    assert proposed.schedule != before.schedule
    assert watch.plan.schedule == before.schedule  # The server still runs it.
    assert proposed.bound == before.bound
    command = watch.server.output.with_suffix(".sh").read_text()
    assert f"--max-num-seqs {proposed.schedule['max_num_seqs']}" in command
    assert main(["simulate", str(watch.server.output)]) == 0


def test_what_was_written_for_some_replicas_stays_in_what_is_written_for_others(make_plan):
    file = make_plan("chunked")
    first = read_plan(file)
    other = ReplicaGroup(
        schedule=replace(first.schedule, variables={**first.schedule.variables, "max_num_seqs": 4}),
        placement=first.placement,
        first_devices=(1, 2),
    )
    save_plan(replace(first, more_replicas=(other,), router="shortest-queue"), file)
    watch = sidecar(file, plug_in=False)
    play(watch, Engine(), requests(1600, 1, scale=2.0))
    written = read_plan(watch.server.output).groups
    assert [one.schedule != old.schedule for one, old in zip(written, watch.plan.groups, strict=True)] == [True, True]


def test_lengths_of_a_plan_that_was_written_and_replaced_are_removed(make_plan):
    watch = sidecar(make_plan("chunked"), plug_in=False)
    traffic = [*requests(1600, 1, scale=2.0), *requests(1600, 2, scale=0.5)]
    said = remarks(play(watch, Engine(), traffic))
    assert said.count("wrote ") > 1
    assert len(re.findall(r"^removed \S+/next-lengths-\w+\.csv, the lengths of a plan", said, re.MULTILINE)) == (
        said.count("wrote ") - 1
    )
    (lengths,) = watch.server.output.parent.glob("next-lengths-*.csv")
    assert Path(read_plan(watch.server.output).workload).resolve() == lengths.resolve()


def test_the_plug_in_gets_its_new_cadence_in_the_file_that_it_reads(make_plan):
    file = make_plan("rra")
    old = read_plan(file)
    watch = sidecar(file, plug_in=True)
    looks = play(watch, Engine(), requests(1600, 2, scale=2.0))
    new = read_plan(file)
    assert new.schedule.policy == "rra"
    assert Cadence.of_schedule(new.schedule) != Cadence.of_schedule(old.schedule)
    assert read_plan(file.with_name("plan-before.yaml")).schedule == old.schedule
    assert watch.plan.schedule == new.schedule
    assert watch.num_replans >= 1
    assert "which the server follows" in remarks(looks)


def test_a_watch_that_starts_anew_keeps_the_first_plan(make_plan):
    file = make_plan("rra")
    first, before = read_plan(file).schedule, file.with_name("plan-before.yaml")
    for scale in (2.0, 0.5):
        watch = sidecar(file, plug_in=True)
        play(watch, Engine(), requests(1600, 2, scale=scale))
        assert watch.num_replans >= 1
        assert read_plan(before).schedule == first
    save_plan(replace(read_plan(file), workload="planned.csv"), file)  # By hand.
    given = read_plan(file).schedule
    play(sidecar(file, plug_in=True), Engine(), requests(1600, 2, scale=2.0))
    assert read_plan(before).schedule == given != first


def test_observed_figures_are_those_of_the_engine(make_plan):
    watch = sidecar(make_plan("chunked"), plug_in=False)
    traffic = requests(400, 5)
    observed = play(watch, Engine(), traffic)[-1].observed
    seconds = EVERY * 400 / 40
    assert observed.num_requests == 400
    assert observed.throughput == pytest.approx(400 / seconds)
    assert observed.token_throughput == pytest.approx(sum(output for _, output in traffic) / seconds)
    assert observed.ttft == pytest.approx(0.1)  # Without the queue, as a plan for a backlog counts.
    assert observed.tpot == pytest.approx(0.01)
    longest = load_workload("planned.csv").output_quantile(0.99)
    assert observed.latency == pytest.approx(0.1 + 0.01 * (longest - 1))
    assert (observed.num_running, observed.num_waiting) == (3, 2)


def test_figures_are_of_the_last_two_readings_where_these_are_far_apart(make_plan):
    watch, engine = sidecar(make_plan("chunked"), plug_in=False), Engine()
    with shown(engine) as url:
        for number in range(3):
            looked = watch.take(400.0 * number, read("vllm", [url]))
            engine.end(requests(40 + number, 5))
    assert looked.observed.num_requests == 41
    assert looked.observed.throughput == pytest.approx(41 / 400)


def test_at_a_rate_the_queue_counts_in_the_observed_figures_and_not_in_the_own_time_of_requests(make_plan):
    file = make_plan("chunked")
    save_plan(replace(read_plan(file), arrival_rate=1.0), file)
    watch = sidecar(file, plug_in=False)
    assert play(watch, Engine(), requests(80, 5))[-1].observed.ttft == pytest.approx(0.3)
    seen = watch._watch.monitor.recent()
    assert [one.seconds for one in seen] == pytest.approx([0.1 + 0.01 * (one.output_tokens - 1) for one in seen])


def test_a_server_that_began_anew_is_said_and_the_watch_goes_on(make_plan):
    watch = sidecar(make_plan("chunked"), plug_in=False)
    play(watch, Engine(), requests(400, 5))
    looks = play(watch, Engine(), requests(400, 6), begin=100.0)
    assert "begun anew" in remarks(looks)
    assert looks[-1].observed.num_requests == 400
    assert looks[-1].state.num_requests > 300


def test_a_plan_that_the_engine_cannot_run_is_said_and_not_written(make_plan, monkeypatch):
    watch = sidecar(make_plan("chunked"), plug_in=False)

    def refuse(self, plan, spec) -> Export:
        raise InputError("vLLM cannot")

    monkeypatch.setattr(Server, "export", refuse)
    assert "not for this server: vLLM cannot" in remarks(play(watch, Engine(), requests(1600, 1, scale=2.0)))
    assert not watch.server.output.exists()


def test_the_dashboard_asks_for_metrics_that_are_shown(make_plan):
    watch = sidecar(make_plan("chunked"), plug_in=False)
    look = play(watch, Engine(), requests(400, 5))[-1]
    shown_names = {
        sample.name
        for family in SidecarMetrics("m", lambda: (watch.plan, look, 0)).collect()
        for sample in family.samples
    }
    asked = {re.match(r"[\w:]+", target["expr"])[0] for p in grafana_dashboard()["panels"] for target in p["targets"]}
    assert asked <= shown_names | {"exeplan:drift_bound_share"}


def test_the_command_shows_figures_and_follows_the_server(make_plan, capsys):
    file, engine = make_plan("chunked"), Engine()
    found = {}

    def look_at(port: int) -> None:
        end = time.monotonic() + 20
        while "exeplan:observed_throughput{" not in found.get("page", "") and time.monotonic() < end:
            engine.end(requests(20, 1))
            time.sleep(0.1)
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                    found["page"] = answer.read().decode()
            except OSError:
                continue

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with shown(engine) as url:
        thread = threading.Thread(target=look_at, args=(port,))
        thread.start()
        words = ["watch", str(file), "--metrics", url, "--every", "200ms", "--for", "3s", "--port", str(port)]
        assert main([*words, "--model", "organisation/name"]) == 0
        thread.join()
    assert "exeplan:plan_predicted_throughput{" in found["page"]
    assert re.search(r"too few requests|as planned", capsys.readouterr().out)


def test_a_plan_by_a_datasheet_is_planned_again_by_the_same_times(folder, capsys):
    asked = ["optimize", "--model", "llama-3.1-8b", "--cluster", "h100", "--gpus", "1", "--engine", "vllm"]
    asked += ["--workload", "alpaca", "--latency-bound", "30s", "--policy", "orca", "-o", "plan.yaml"]
    assert main(asked) == 0
    with shown(Engine()) as url:
        asked = ["watch", "plan.yaml", "--metrics", url, "--for", "100ms", "--port", "0"]
        assert main([*asked, "--model", "meta-llama/Llama-3.1-8B"]) == 0
    assert "wrote plan-next-profile.json, the plan's times (datasheet h100" in capsys.readouterr().out
    made = load_profile(folder / "plan-next-profile.json")
    assert made.fingerprint == read_plan(folder / "plan.yaml").profile_fingerprint
    assert made.engine == "vllm"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name the PLAN"),
        (["plan.yaml"], "--metrics URL"),
        (["plan.yaml", "--metrics", "localhost:8000"], "takes a URL"),
        (["plan.yaml", "--metrics", "http://127.0.0.1:9", "--engine", "tgi"], "not those of 'tgi'"),
        (["plan.yaml", "--metrics", "http://127.0.0.1:9", "--engine", "sglang", "--plug-in"], "for vLLM"),
        (["plan.yaml", "--metrics", "http://127.0.0.1:9", "-o", "plan.yaml"], "another file"),
        (["plan.yaml", "--metrics", "http://127.0.0.1:9", "--port", "70000"], "--port"),
        (["plan.yaml", "--metrics", "http://127.0.0.1:9", "--every", "fast"], "--every"),
        (["plan.yaml", "--metrics", "http://127.0.0.1:9", "--every", "inf"], "--every must lie between 10 ms and 24 h"),
        (["plan.yaml", "--metrics", "http://127.0.0.1:9"], "no metrics from http://127.0.0.1:9"),
    ],
)
def test_wrong_words_get_one_sentence(make_plan, capsys, words, said):
    make_plan("chunked")
    assert main(["watch", *words, "--model", "organisation/name"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.strip().count("\n") == 0


def test_the_dashboard_is_written_alone(folder, capsys):
    assert main(["watch", "--grafana", "board.json"]) == 0
    assert json.loads((folder / "board.json").read_text())["panels"]
    assert capsys.readouterr().out.startswith("wrote board.json")
