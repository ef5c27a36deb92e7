"""`/metrics` counts what the engine reported, and Prometheus' own parser reads every name from the start."""

import pytest
from msgspec.structs import replace
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from exeplan.core.bounds import Bound
from exeplan.core.plan import Plan
from exeplan.core.schedule import Estimate, Schedule, Stage
from exeplan.drift.state import DriftState, FewerDevices, Replanned, ReplanState, summary
from exeplan.runner.ipc.messages import Event, Stats
from exeplan.runner.server.network.clients import Totals
from exeplan.runner.server.observation.metrics import FINISH_REASONS, REJECTIONS, Histogram, Reading, ServeMetrics
from exeplan.runner.server.observation.observed import Observed

IDLE = Stats(num_blocks=10, free_blocks=10)
MODEL_NAME = 'm"x\\y\nz'
HISTOGRAMS = """time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds
    e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds
    request_prompt_tokens request_generation_tokens iteration_tokens_total"""
COUNTERS = """num_preemptions_total prompt_tokens_total generation_tokens_total request_success_total
    admission_rejections_total replans_total
    client_requests_total client_rejections_total client_prompt_tokens_total client_generation_tokens_total
    reference_pass_seconds_total"""
SUMMARIES = "machine_slowness"
GAUGES = """num_requests_running num_requests_waiting kv_cache_usage_perc
    drift_measure drift_requests drift_bound_share drift_best_gain drift_bound_missed
    replan_pause_seconds replan_last_seconds replan_proposed replan_reduced_replicas replan_reduced_bound_missed
    replicas_wanted replicas_needed replicas_serving replicas_starting replicas_draining arrival_rate
    plan_predicted_throughput plan_predicted_token_throughput plan_predicted_ttft_seconds plan_predicted_tpot_seconds
    plan_predicted_latency_seconds plan_predicted_latency_p50_seconds plan_predicted_latency_p99_seconds
    plan_predicted_attainment plan_predicted_goodput observed_attainment observed_goodput
    plan_predicted_kv_tokens plan_predicted_memory_bytes_per_gpu plan_predicted_deadline_share plan_predicted_utility
    plan_predicted_prefill_batch plan_predicted_decode_batch
    observed_num_requests observed_throughput observed_token_throughput observed_ttft_seconds observed_tpot_seconds
    observed_latency_seconds observed_latency_p50_seconds observed_latency_p99_seconds observed_prefill_batch
    observed_decode_batch plan_latency_bound_seconds plan_bound_seconds observed_share_within_bound
    observed_num_observations client_sequences_waiting client_sequences_running front_end_requests"""
"""Dashboards and alerts of operators use these names: they are never renamed."""


def event(time, *, finish_reason=None):
    times = {"arrival": 1.0, "start": 1.5, "time": time}
    rest = {"finish_reason": finish_reason, "first": time == 2.0, "num_prompt_tokens": 7}
    return Event(request_id="1-0", token_ids=[5], text="a", **times, **rest)


def plan(**fields):
    fields = {"bound": Bound(seconds=2.0), **fields}
    schedule = Schedule("rra", {"prefill_batch": 1, "decode_steps": 2})
    return Plan(model="m", schedule=schedule, placement=(Stage(layers=(0, 1)),), **fields)


class Engine:
    """What a scrape reads, apart from what `metrics` has counted."""

    def __init__(self, active, aliases=None):
        self.stats, self.replanning, self.scaling, self.now = IDLE, {}, {}, 0.0
        self.front_ends = {}
        self.observed = Observed(active, clock=lambda: self.now)
        self.now = 10.0
        self.metrics = ServeMetrics(
            model_name=MODEL_NAME, plan=active, observed=self.observed, read=self.read, aliases=aliases
        )

    def read(self):
        observed = self.observed.snapshot()
        clients = {"chat": Totals()}
        return Reading(
            stats=self.stats,
            observed=observed,
            num_waiting=3,
            replanning=self.replanning,
            clients=clients,
            scaling=self.scaling,
            front_ends=self.front_ends,
        )

    def page(self):
        return generate_latest(self.metrics.registry).decode()

    def values(self):
        """Every sample without buckets: by name, and by name and label where there is one besides the model's."""
        found = {}
        for family in text_string_to_metric_families(self.page()):
            for sample in family.samples:
                labels = dict(sample.labels)
                assert labels.pop("model_name") == MODEL_NAME
                if "le" not in labels:
                    name = sample.name.removeprefix("exeplan:")
                    found[(name, *labels.values()) if labels else name] = sample.value
        return found


@pytest.fixture
def engine():
    return Engine(plan())


def test_one_request_by_hand(engine):
    engine.metrics.step([event(2.0)], Stats(iteration_tokens=7, num_blocks=10, free_blocks=5))
    engine.metrics.step([event(2.25)], Stats(iteration_tokens=1))
    engine.metrics.step([event(3.0, finish_reason="stop")], Stats(iteration_tokens=1))
    found = engine.values()
    sums = {name: found[f"{name}_seconds_sum"] for name in ("time_to_first_token", "inter_token_latency")}
    assert sums == {"time_to_first_token": 1.0, "inter_token_latency": 1.0}
    assert found["inter_token_latency_seconds_count"] == 2
    assert found["request_queue_time_seconds_sum"] == 0.5
    assert found["request_prefill_time_seconds_sum"] == 0.5
    assert found["request_decode_time_seconds_sum"] == 1.0
    assert found["request_time_per_output_token_seconds_sum"] == 0.5
    assert found["e2e_request_latency_seconds_sum"] == 2.0
    assert (found["prompt_tokens_total"], found["generation_tokens_total"]) == (7, 3)
    assert found["iteration_tokens_total_sum"] == 9
    assert found["request_success_total", "stop"] == 1


def test_slowness_is_summed_over_the_iterations_that_a_reference_pass_followed(engine):
    for slowness, seconds in ((1.25, 0.01), (0.0, 0.0), (1.5, 0.02)):
        engine.metrics.step([], Stats(slowness=slowness, reference_seconds=seconds))
    found = engine.values()
    assert (found["machine_slowness_count"], found["machine_slowness_sum"]) == (2, 2.75)
    assert found["reference_pass_seconds_total"] == pytest.approx(0.03)


def test_a_dropped_request_counts_once(engine):
    engine.metrics.step([event(2.0)], IDLE)
    engine.metrics.dropped("1-0")
    engine.metrics.dropped("1-0")
    engine.metrics.dropped("never ran")
    assert +engine.metrics.finished == {"abort": 1}


@pytest.mark.parametrize("reason", ["expired", "lost", "error", "structure"])
def test_a_sequence_without_a_token_has_no_latencies(engine, reason):
    engine.metrics.step([replace(event(2.5, finish_reason=reason), token_ids=())], IDLE)
    found = engine.values()
    assert +engine.metrics.finished == {reason: 1}
    assert {name: found[f"{name}_seconds_count"] for name in ("time_to_first_token", "e2e_request_latency")} == {
        "time_to_first_token": 0,
        "e2e_request_latency": 0,
    }


def test_gauges_show_the_engine_and_the_bound(engine):
    engine.stats = Stats(num_running=2, num_blocks=10, free_blocks=4)
    found = engine.values()
    assert found["kv_cache_usage_perc"] == pytest.approx(0.6)
    assert (found["num_requests_running"], found["num_requests_waiting"]) == (2, 3)
    assert found["plan_latency_bound_seconds"] == 2.0


def test_preemptions_are_summed_over_reports_whichever_engine_they_are_from(engine):
    for number in (2, 0, 3):
        engine.metrics.step([], Stats(num_preemptions=number))
    engine.stats = Stats()  # That of an engine that has just begun.
    assert engine.values()["num_preemptions_total"] == 5


def test_every_name_has_help_and_type_from_the_start_and_counters_their_zeros(engine):
    page = engine.page()
    kinds = {"histogram": HISTOGRAMS, "counter": COUNTERS, "gauge": GAUGES, "summary": SUMMARIES}
    wanted = {f"# TYPE exeplan:{name} {kind}" for kind, names in kinds.items() for name in names.split()}
    assert {line for line in page.splitlines() if line.startswith("# TYPE")} == wanted
    helped = {line.split()[2] for line in page.splitlines() if line.startswith("# HELP") and len(line.split()) > 3}
    assert helped == {line.split()[2] for line in wanted}
    found = engine.values()
    counted = {name: value for name, value in found.items() if (name if isinstance(name, str) else name[0]) in COUNTERS}
    labels = {("request_success_total", reason) for reason in FINISH_REASONS}
    labels |= {("admission_rejections_total", reason) for reason in REJECTIONS}
    labels |= {(name, "chat") for name in COUNTERS.split() if name.startswith("client_")}
    plain = set(COUNTERS.split()) - {name for name, _ in labels}
    assert counted == dict.fromkeys(plain | labels, 0)
    assert all(found[f"{name}_count"] == 0 for name in HISTOGRAMS.split())


def test_no_sample_has_another_name(engine):
    """All values known: the library adds no suffix, and nothing is left out."""
    numbers = dict.fromkeys(("throughput", "token_throughput", "ttft", "tpot", "latency", "latency_p50"), 1.0)
    rest = {"latency_p99": 1.0, "kv_tokens": 1, "memory_bytes_per_gpu": 1.0, "deadline_share": 1.0, "utility": 1.0}
    rest.update(attainment=1.0, goodput=1.0)
    active = plan(estimate=Estimate(**numbers, **rest), more_bounds=(Bound(seconds=0.1, metric="ttft"),))
    engine = Engine(active)
    engine.observed.p99_output = 2
    last = Replanned(number=1, seconds=1.0, source="drift", reason="", plan=active, old=None, new=None, diff="")
    drift = DriftState(bound_share=0.9, best_gain=0.1, missed=1.5)
    devices = FewerDevices(num_replicas=1, missed=1.5, verdict="1 of 2 devices are left")
    engine.replanning = summary(ReplanState(mode="auto", plan=active, drift=drift, last=last, devices=devices))
    scaling = "replicas_wanted replicas_needed replicas_serving replicas_starting replicas_draining arrival_rate"
    engine.scaling = dict.fromkeys(scaling.split(), 1.0)
    engine.front_ends = {"10.0.0.2:8000": 3}
    ran = {"iteration_tokens": 7, "num_blocks": 10, "free_blocks": 5}
    engine.metrics.step([event(2.0)], Stats(**ran, num_prefill=1))
    engine.metrics.step([event(2.5), event(3.0, finish_reason="stop")], Stats(**ran, num_decode=1))
    names = {name if isinstance(name, str) else name[0] for name in engine.values()}
    sums = {f"{name}_{part}" for name in (*HISTOGRAMS.split(), SUMMARIES) for part in ("sum", "count")}
    assert names == sums | set(COUNTERS.split()) | set(GAUGES.split())


def test_names_of_vllm_are_further_families_with_the_same_samples(engine):
    """By vLLM's `vllm/v1/metrics/loggers.py`."""
    shared = {*HISTOGRAMS.split(), *GAUGES.split()[:3], *COUNTERS.split()[:4]}
    both = Engine(plan(), aliases="vllm")
    for one in (engine, both):
        one.metrics.step([event(2.0)], Stats(iteration_tokens=7, num_blocks=10, free_blocks=5))
        one.metrics.step([event(3.0, finish_reason="stop")], Stats(iteration_tokens=1))
    families = list(text_string_to_metric_families(both.page()))
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    found = {one.name.removeprefix("vllm:"): one for one in families if one.name.startswith("vllm:")}
    assert set(found) == {name.removesuffix("_total") if name in COUNTERS else name for name in shared}
    for own in families:
        if other := found.get(own.name.removeprefix("exeplan:")) if own.name.startswith("exeplan:") else None:
            assert (other.type, other.documentation) == (own.type, own.documentation)
            assert [s[1:] for s in other.samples] == [s[1:] for s in own.samples]
            assert {s.name.partition(":")[0] for s in other.samples} == {"vllm"}
    assert "vllm:" not in engine.page()


def test_buckets_are_cumulative_and_closed_by_infinity():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.add(value)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]
    assert histogram.sum == 12.0
