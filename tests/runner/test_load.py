"""A load is played as drawn: every request gets its tokens, in all three kinds of load and on both clocks."""

import numpy as np
import pytest

from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.runs.metrics import summarize
from exeplan.core.schedule import Schedule, Stage
from exeplan.errors import InputError
from exeplan.runner.engine.engine import Engine
from exeplan.runner.engine_process.build import build_engine, engine_setup
from exeplan.runner.load import Load, draw_load, play_engine, served_model
from exeplan.workload.files import load_workload
from exeplan.workload.workload import Trace, Workload


@pytest.fixture(scope="module")
def engine() -> Engine:
    plan = Plan(
        model="demo",
        schedule=Schedule("rra", {"prefill_batch": 3, "decode_steps": 4}),
        placement=(Stage(layers=(0, 6)),),
        kv_cache_tokens=1024,
    )
    return build_engine(engine_setup(plan, load_model_spec("demo")))


@pytest.mark.parametrize(
    "load",
    [
        Load(input_tokens=np.array([5, 9, 3, 7]), output_tokens=np.array([4, 1, 6, 2])),
        Load(input_tokens=np.array([5, 9, 3, 7]), output_tokens=np.array([4, 1, 6, 2]), concurrency=1),
        Load(input_tokens=np.array([5, 9, 3]), output_tokens=np.array([4, 1, 6]), arrivals=np.array([0.0, 0.01, 0.3])),
    ],
    ids=["backlog", "closed loop", "open loop"],
)
def test_every_request_gets_the_tokens_it_was_drawn_with(engine: Engine, load: Load) -> None:
    run = play_engine(engine, load, vocab_size=2048)
    assert [r.output_tokens for r in run.records] == load.output_tokens.tolist()
    assert [r.input_tokens for r in run.records] == load.input_tokens.tolist()
    for record in run.records:
        assert record.arrival <= record.start < record.token_times[0]
        assert list(record.token_times) == sorted(record.token_times)


def test_a_closed_loop_of_one_runs_the_requests_one_after_the_other(engine: Engine) -> None:
    load = Load(input_tokens=np.array([5, 5, 5]), output_tokens=np.array([3, 3, 3]), concurrency=1)
    first, second, third = play_engine(engine, load, vocab_size=2048).records
    assert first.token_times[-1] <= second.start
    assert second.token_times[-1] <= third.start


def test_the_cpu_clock_is_never_ahead_of_the_wall(engine: Engine) -> None:
    load = Load(input_tokens=np.full(6, 8), output_tokens=np.full(6, 10))
    run = play_engine(engine, load, vocab_size=2048)
    for wall, cpu in zip(run.records, run.on_cpu_clock(), strict=True):
        assert cpu.token_times[-1] - cpu.start <= (wall.token_times[-1] - wall.start) * 1.05
    assert summarize(run.records, p99_output=10).latency is not None


def test_poisson_arrivals_come_at_the_rate_asked_for() -> None:
    load = draw_load(load_workload("alpaca"), 4000, rate=20.0)
    assert load.arrivals is not None
    assert load.arrivals[-1] == pytest.approx(200, rel=0.1)
    assert not load.backlog


def test_a_trace_is_played_at_its_own_times() -> None:
    trace = Trace(np.array([1, 2, 3]), np.array([4, 5, 6]), np.array([10.0, 10.5, 12.0]))
    load = draw_load(Workload.of_trace("t", trace), 2, trace_arrivals=True)
    assert load.input_tokens.tolist() == [1, 2]
    assert load.arrivals is not None
    assert load.arrivals.tolist() == [0.0, 0.5]


def test_a_workload_without_times_cannot_be_played_at_its_own() -> None:
    with pytest.raises(InputError, match="'alpaca' has no arrival times"):
        draw_load(load_workload("alpaca"), 10, trace_arrivals=True)


def test_prompts_are_the_same_for_the_same_seed_only() -> None:
    load = Load(input_tokens=np.array([50]), output_tokens=np.array([1]))
    other = Load(input_tokens=np.array([50]), output_tokens=np.array([1]), seed=1)
    assert load.prompt(0, 2048) == load.prompt(0, 2048) != other.prompt(0, 2048)
    assert all(0 <= token < 2048 for token in load.prompt(0, 2048))


@pytest.mark.parametrize(
    ("url", "message"),
    [("nohost", "must begin with http:// or https://, found 'nohost'"), ("http://127.0.0.1:1", "does not answer: ")],
)
def test_a_url_without_a_server_is_said_in_one_sentence(url: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as found:
        served_model(url)
    assert "<" not in str(found.value)
