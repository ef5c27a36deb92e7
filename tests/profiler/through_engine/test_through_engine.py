"""Rows from whole passes of an engine sum to what was measured; a stand-in program speaks the driver's protocol."""

import sys
from pathlib import Path

import pytest

from exeplan.cli import main
from exeplan.core.batch import Batch, SequenceState
from exeplan.core.models.model import load_model_spec
from exeplan.core.profile import load_profile
from exeplan.errors import InputError
from exeplan.profiler.through_engine import driver as driver_module
from exeplan.profiler.through_engine.batches import DecodeBatch, PrefillBatch, Reach, batches
from exeplan.profiler.through_engine.decompose import Timed, rows_of
from exeplan.profiler.through_engine.driver import EngineDriver, with_layers
from exeplan.profiler.through_engine.profile_engine import profile_engine
from exeplan.simulator.cost import CostModel

pytestmark = pytest.mark.usefixtures("rates_measured_once")
REACH = Reach(max_num_seqs=16, max_context=512, max_num_tokens=1024, kv_tokens=16 * 640)
STAND_IN = """
import json, sys
setup = json.loads(sys.stdin.readline())
with open(setup["model"] + "/config.json") as file:
    layers = json.load(file)["num_hidden_layers"]
assert setup["max_num_seqs"] >= 1 and setup["kv_cache_memory_bytes"] > 0
print(json.dumps({"version": "9.9"}), flush=True)
for line in sys.stdin:
    wanted = json.loads(line)
    if "decode" in wanted:
        d = wanted["decode"]
        each = [1e-3 + 1e-5 * d["num_seqs"] + layers * (2e-4 + 1e-5 * d["num_seqs"]
                + 1e-8 * d["num_seqs"] * (d["context"] + 1 + step)) for step in range(d["steps"])]
        print(json.dumps({"seconds": each}), flush=True)
    else:
        tokens = wanted["prefill"]["lengths"]
        seconds = 1e-3 + 1e-5 * len(tokens) + 1e-6 * sum(tokens)
        seconds += layers * (2e-4 + 1e-5 * sum(tokens) + 5e-9 * sum(n * n for n in tokens))
        print(json.dumps({"seconds": seconds}), flush=True)
"""


def decode_seconds(rows: int, context: float, layers: int) -> float:
    return 1e-3 + 1e-5 * rows + layers * (2e-4 + 1e-5 * rows + 1e-8 * rows * context)


def prefill_seconds(lengths: list[int], layers: int) -> float:
    squares = sum(length**2 for length in lengths)
    tokens = sum(lengths)
    return 1e-3 + 1e-5 * len(lengths) + 1e-6 * tokens + layers * (2e-4 + 1e-5 * tokens + 5e-9 * squares)


def sequence(prompt: int, *, num_output_tokens: int = 0) -> SequenceState:
    return SequenceState(
        request_id="a", num_prompt_tokens=prompt, max_output_tokens=9, num_output_tokens=num_output_tokens
    )


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A program that answers as an engine of the laws above; the interpreter is this one."""
    program = tmp_path / "engine.py"
    program.write_text(STAND_IN)
    monkeypatch.setattr(driver_module, "_PROGRAM", program)
    return sys.executable


def test_batches_reach_what_there_is_and_no_further() -> None:
    found = batches(REACH)
    decodes = [batch for batch in found if isinstance(batch, DecodeBatch)]
    prefills = [batch for batch in found if isinstance(batch, PrefillBatch)]
    assert max(batch.num_seqs for batch in decodes) == 16
    assert max(batch.first_context + batch.steps for batch in decodes) < 512
    assert max(batch.num_tokens for batch in prefills) == 1024
    assert max(max(batch.lengths) for batch in prefills) < 512
    assert all(sum(batch.lengths) == batch.num_tokens for batch in prefills)
    assert len(found) == len(set(found))


def test_keys_and_values_stay_within_the_memory() -> None:
    spec = load_model_spec("demo")
    asked = {"max_num_seqs": 16, "max_context": 512, "max_num_tokens": 1024}
    assert Reach.within(spec, "float32", kv_bytes=1e12, **asked) == REACH
    small = Reach.within(spec, "float32", kv_bytes=4096 * spec.kv_bytes_per_token("float32"), **asked)
    assert small.kv_tokens == 4096
    assert small.kv_bytes(spec, 3, "float32") == 2048 * spec.kv_bytes_per_token("float32")
    assert 0 < len(batches(small)) < len(batches(REACH))
    assert max(batch.num_seqs * batch.first_context for batch in batches(small) if hasattr(batch, "steps")) < 4096


def test_the_sum_of_the_rows_is_what_was_measured(stand_in: str, tmp_path: Path) -> None:
    """Of decode passes and prompts, measured ones and others, at a number of layers that was not timed."""
    spec = load_model_spec("demo")
    profile = profile_engine(
        spec, "vllm", python=stand_in, output=tmp_path / "p.json", budget_seconds=1.0, max_num_seqs=16,
        max_context=512, progress=False,
    )  # fmt: skip
    assert load_profile(tmp_path / "p.json").measurements == profile.measurements
    assert (profile.source, profile.versions["vllm"]) == ("measured with vllm", "9.9")
    cost = CostModel(profile)
    for rows, context in ((1, 100), (6, 300), (16, 450)):
        batch = Batch(decode=tuple(sequence(context, num_output_tokens=1) for _ in range(rows)))
        assert cost.batch_seconds(batch) == pytest.approx(decode_seconds(rows, context, 6), rel=0.02)
    for lengths in ([256], [400], [64] * 8):
        batch = Batch(prefill=tuple(map(sequence, lengths)))
        assert cost.batch_seconds(batch) == pytest.approx(prefill_seconds(lengths, 6), rel=0.05)


def test_layers_are_cut_with_what_is_listed_for_each() -> None:
    config = {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"], "eos_token_id": [1, 2]}
    assert with_layers(config, 1) == {"num_hidden_layers": 1, "layer_types": ["a"], "eos_token_id": [1, 2]}


@pytest.mark.parametrize("name", ["n_layer", "n_layers"])
def test_layers_are_cut_under_the_name_that_the_config_has_for_them(name: str) -> None:
    assert with_layers({name: 12, "n_head": 12}, 2) == {name: 2, "n_head": 12}


def test_an_engine_that_is_slower_with_fewer_layers_gives_rows_above_zero() -> None:
    timed = {batch: Timed(whole=1.0, few=1.1, repeats=1) for batch in batches(REACH)}
    assert all(row.seconds > 0 for row in rows_of(timed, num_layers=4, few_layers=1))


def test_a_budget_that_no_pass_fits_is_too_small(stand_in: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give a larger --budget"):
        profile_engine(
            load_model_spec("demo"), "vllm", python=stand_in, output=tmp_path / "p.json", budget_seconds=1e-6,
            progress=False,
        )  # fmt: skip


def test_an_engine_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "engine.py"
    program.write_text("import sys\nprint('loading', file=sys.stderr)\nimport no_such_engine\n")
    monkeypatch.setattr(driver_module, "_PROGRAM", program)
    with (
        EngineDriver(
            sys.executable, load_model_spec("demo"), 1, dtype="float32", reach=REACH, environment={}
        ) as driver,
        pytest.raises(InputError, match="does not run this: ModuleNotFoundError: No module named 'no_such_engine'"),
    ):
        driver.version()


def test_bad_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = ["-o", str(tmp_path / "p.json")]
    for words, sentence in (
        (["demo", "--engine", "sglang"], "profiles are measured on the engine vllm, found 'sglang'"),
        (["t5-11b", "--engine", "vllm"], "has an encoder and a decoder, which vLLM does not run"),
        (["demo", "--engine", "vllm", "--devices", "2"], "is measured on one device"),
        (["demo", "--engine", "vllm", "--target-error", "0.1"], "is timed for its --budget"),
        (["demo", "--engine", "vllm", "--dtype", "fp8"], "quantized weights are not measured through vLLM"),
        (["demo", "--engine-python", "x"], "--engine-python goes with --engine vllm"),
        (["demo", "--engine", "vllm", "--engine-python", "/no/such"], "cannot run '/no/such': No such file"),
    ):
        assert main(["profile", *words, *output]) == 2
        assert sentence in capsys.readouterr().err
