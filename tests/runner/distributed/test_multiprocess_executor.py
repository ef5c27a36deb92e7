"""Workers give the greedy tokens of transformers' `generate`, however a model is split and whatever the policy."""

import contextlib
import functools
import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, Stage
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine.engine import Engine, Request
from exeplan.runner.engine.executor import WorkerError
from exeplan.runner.engine.timeline import read_events
from exeplan.runner.engine_process.build import build_engine, engine_setup

VOCAB = 97
SIZES = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
ENDLESS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
ROTARY = {**SIZES, **ENDLESS, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 128}
CASES = {
    "llama": ROTARY,
    "qwen2": {**ROTARY, "tie_word_embeddings": True},
    "qwen3": {**ROTARY, "num_key_value_heads": 1, "head_dim": 16},
    "mistral": {**ROTARY, "sliding_window": 9},
    "opt": {**SIZES, **ENDLESS, "ffn_dim": 64, "max_position_embeddings": 128, "word_embed_proj_dim": 40},
    "gpt2": {**ENDLESS, "vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 128},
    "deepseek_v2": {
        **ROTARY, "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": None, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1,
    },
    "t5": {
        "vocab_size": VOCAB, "d_model": 48, "d_kv": 16, "num_heads": 4, "d_ff": 64, "num_layers": 2,
        "num_decoder_layers": 3, "decoder_start_token_id": 0, "eos_token_id": None, "feed_forward_proj": "gated-gelu",
    },
}  # fmt: skip
SHARED = {
    "orca": Schedule("orca", {"max_num_seqs": 5, "micro_batches": 2}),
    "rra": Schedule("rra", {"prefill_batch": 3, "decode_steps": 4, "micro_batches": 2}),
    "static": Schedule("static", {"batch_size": 4, "micro_batches": 2}),
    "chunked": Schedule("chunked", {"max_num_seqs": 5, "max_num_batched_tokens": 24, "micro_batches": 2}),
}
APART = {
    "waa-c": Schedule("waa-c", {"decode_batch": 4, "prefill_batch": 2, "micro_batches": 2}),
    "waa-m": Schedule("waa-m", {"decode_batch": 3, "prefill_batch": 1}),
}
PLACEMENTS = {"tp2": [2], "pp2": [1, 1], "tp2-pp2": [2, 2], "widths-2-1": [2, 1]}
APART_PLACEMENTS = {"1+1": ([1], [1]), "2+1": ([2], [1]), "1-1+2": ([1, 1], [2])}
EVERYWHERE = ("llama", "t5")
"""A decoder and an encoder-decoder run under all schedules, the decoder on all placements. What splits another family's
layers and heads is its own (`test_shards.py` has all cases), so it runs where there is most of that: several stages,
and one of two devices."""
ON_SHARED = [(f, p) for f in CASES for p in PLACEMENTS if f == "llama" or p == "tp2-pp2"] + [("t5", "pp2")]
ON_APART = [(f, p) for f in CASES for p in APART_PLACEMENTS if f in EVERYWHERE or p == "1-1+2"]
# Their one key/value head, or latent vector, is on both devices that prefill.
ON_APART += [("qwen3", "2+1"), ("deepseek_v2", "2+1")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Saves a random checkpoint of a family once; weights are large enough that no two logits are close."""

    @functools.cache
    def make(family):
        torch.manual_seed(0)
        if family == "t5":
            model = T5ForConditionalGeneration(T5Config(**CASES[family])).eval()
        else:
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**CASES[family])).eval()
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.15)
        directory = tmp_path_factory.mktemp(family)
        model.save_pretrained(directory)
        return model, str(directory)

    return make


REQUESTS = [([(7 * n + 11 * i) % VOCAB for i in range(1 + (13 * n) % 37)], 1 + (5 * n) % 23) for n in range(10)]


@pytest.fixture(scope="module")
def expected(checkpoint):
    """What transformers generates for every request, alone."""

    @functools.cache
    def make(family):
        model, _ = checkpoint(family)
        texts = []
        for prompt, count in REQUESTS:
            ids = torch.tensor([prompt])
            # Its cache has too few layers for a T5 decoder that is deeper than the encoder (transformers 5.23).
            options = {"use_cache": False} if family == "t5" else {"pad_token_id": 0}
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **options
            )
            texts.append(out[0, 1 if family == "t5" else len(prompt) :].tolist())
        return texts

    return make


def placement(spec, widths, *, phase="", first=0, unlike=False):
    """Stages of these widths, uneven in layers: the last one has the rest, or the first."""
    count = len(widths)
    cuts = [round(spec.num_layers * (i / count) ** (0.5 if unlike else 1)) for i in range(count + 1)]
    encoder = [round(spec.num_encoder_layers * i / count) for i in range(count + 1)]
    if phase and spec.is_encoder_decoder:
        cuts = [0] * (count + 1) if phase == "prefill" else cuts
        encoder = [0] * (count + 1) if phase == "decode" else encoder
    stages = []
    for width, layers, encoder_layers in zip(widths, pairwise(cuts), pairwise(encoder), strict=True):
        devices = tuple(range(first, first + width))
        stages.append(Stage(devices=devices, layers=layers, encoder_layers=encoder_layers, phase=phase))
        first += width
    return tuple(stages)


def apart(spec, prefill, decode):
    return (
        *placement(spec, prefill, phase="prefill"),
        *placement(spec, decode, phase="decode", first=sum(prefill), unlike=True),
    )


def setup(directory, stages, schedule, **options):
    spec = load_model_spec(directory)
    plan = Plan(model=directory, schedule=schedule, placement=stages, kv_cache_tokens=options.pop("tokens", 320))
    return engine_setup(plan, spec, **options)


def answers(engine, requests=REQUESTS):
    """The tokens of all requests, added at once."""
    found = {}
    for number, (prompt, count) in enumerate(requests):
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        engine.add(Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling))
        found[str(number)] = []
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
    assert engine.free_blocks == engine.num_blocks
    return list(found.values())


def step_to_the_end(engine):
    while engine.has_work:
        engine.step()


def check(stages, schedules, directory, expected):
    """All schedules on the same workers, in mixed batches, and one request alone."""
    with contextlib.closing(build_engine(setup(directory, stages, next(iter(schedules))))) as engine:
        executor = engine._executor
        for schedule in schedules:
            again = Engine(executor, schedule, num_blocks=engine.num_blocks)
            assert answers(again) == expected, schedule
        assert answers(again, REQUESTS[5:6]) == expected[5:6]


@pytest.mark.parametrize(("family", "widths"), ON_SHARED)
def test_shared_stages_equal_generate(family, widths, checkpoint, expected):
    directory = checkpoint(family)[1]
    schedules = SHARED.values() if family in EVERYWHERE else [SHARED["orca"], SHARED["rra"]]
    check(placement(load_model_spec(directory), PLACEMENTS[widths]), schedules, directory, expected(family))


@pytest.mark.parametrize(("family", "widths"), ON_APART)
def test_separate_stages_equal_generate(family, widths, checkpoint, expected):
    directory = checkpoint(family)[1]
    stages = apart(load_model_spec(directory), *APART_PLACEMENTS[widths])
    check(stages, APART.values(), directory, expected(family))


def test_experts_divided_among_devices_equal_generate(checkpoint, expected):
    """Where stages do both, and where some only prefill."""
    directory = checkpoint("deepseek_v2")[1]
    spec, wanted = load_model_spec(directory), expected("deepseek_v2")
    shared, separate = placement(spec, PLACEMENTS["tp2-pp2"]), apart(spec, *APART_PLACEMENTS["2+1"])
    for stages, schedules in ((shared, [SHARED["orca"], SHARED["rra"]]), (separate, APART.values())):
        divided = tuple(replace(stage, expert_parallel_size=stage.num_devices) for stage in stages)
        check(divided, schedules, directory, wanted)


def test_a_batch_that_takes_longer_than_the_deadline_means_a_worker_that_hangs(checkpoint, expected):
    directory = checkpoint("llama")[1]
    stages = placement(load_model_spec(directory), [1, 1])
    with contextlib.closing(build_engine(setup(directory, stages, SHARED["orca"]))) as engine:
        engine._executor._deadline, usual = 0.0, engine._executor._deadline
        engine.add(Request(request_id="a", prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=50)))
        with pytest.raises(WorkerError, match="a batch took longer than 0 s: a worker hangs"):
            step_to_the_end(engine)  # A batch may be ready before it is waited for.
        engine._executor._deadline = usual
        engine.restart()
        engine.abort("a")
        assert answers(engine) == expected("llama")


@pytest.mark.parametrize("leaves", ["aborted", "preempted"])
def test_a_request_that_leaves_before_its_encoder_output_is_taken_keeps_no_blocks(leaves, checkpoint, expected):
    directory = checkpoint("t5")[1]
    stages = placement(load_model_spec(directory), [1, 1])
    requests = [([(7 * n + 11 * i) % VOCAB for i in range(60)], 30) for n in range(10)]
    with contextlib.closing(build_engine(setup(directory, stages, SHARED["rra"]))) as engine:
        for number, (prompt, count) in enumerate(requests):
            sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            engine.add(Request(request_id=f"left {number}", prompt_token_ids=prompt, sampling=sampling))
            if leaves == "aborted":
                engine.step()
                engine.abort(f"left {number}")
        step_to_the_end(engine)
        assert engine.num_preemptions or leaves == "aborted"
        assert answers(engine) == expected("t5")


def timeline(directory, stages, schedule, path, rounds=2):
    """(name, stage, requests prefilled, requests decoded, start, end) of every pass after the warm-up."""
    with contextlib.closing(build_engine(setup(directory, stages, schedule, tokens=4096, timeline=path))) as engine:
        answers(engine, REQUESTS * rounds)
    json.loads(path.read_text().rstrip(",\n") + "]")  # As Perfetto reads it.
    passes = [event for event in read_events(path) if event["ph"] == "X"]
    passes = [event for event in passes if not str(event["args"]).count("warm-up")]
    return sorted(passes, key=lambda event: event["ts"])


def on_stage(passes, stage):
    return [(event["args"]["prefill"], event["args"]["decode"]) for event in passes if event["tid"] == stage]


def test_every_stage_runs_every_batch_in_one_order(checkpoint, tmp_path):
    directory = checkpoint("llama")[1]
    stages = placement(load_model_spec(directory), [1, 1])
    passes = timeline(directory, stages, SHARED["orca"], tmp_path / "t.json")
    assert on_stage(passes, 0) == on_stage(passes, 1)


def test_rra_prefills_its_batch_then_decodes_its_steps(checkpoint, tmp_path):
    directory = checkpoint("llama")[1]
    stages = placement(load_model_spec(directory), [1, 1])
    schedule = Schedule("rra", {"prefill_batch": 3, "decode_steps": 4, "micro_batches": 1})
    cycles, decodes = [], 0
    for prefill, decode in on_stage(timeline(directory, stages, schedule, tmp_path / "t.json"), 0):
        assert not (prefill and decode)
        if prefill:
            cycles.append((decodes, len(prefill)))
            decodes = 0
        else:
            decodes += 1
    assert [count for _, count in cycles[:-1]] == [3] * (len(cycles) - 1)
    assert {steps for steps, _ in cycles[1:]} == {4}


def test_orca_is_first_come_first_served_and_fills_its_slots(checkpoint, tmp_path):
    directory = checkpoint("llama")[1]
    stages = placement(load_model_spec(directory), [1, 1])
    passes = on_stage(timeline(directory, stages, SHARED["orca"], tmp_path / "t.json"), 0)
    admitted = [int(name) for prefill, _ in passes for name in prefill]
    assert admitted == sorted(admitted)
    assert max(len(prefill) + len(decode) for prefill, decode in passes) == 3  # 5 slots in 2 batches.


def test_waa_separates_prefills_from_decodes(checkpoint, tmp_path):
    directory = checkpoint("llama")[1]
    stages = apart(load_model_spec(directory), [1], [1])
    passes = timeline(directory, stages, APART["waa-c"], tmp_path / "t.json", rounds=10)
    assert all(not decode for _, decode in on_stage(passes, 0))
    assert all(not prefill for prefill, _ in on_stage(passes, 1))
    # Where both workers share a core with others, few passes of microseconds overlap: hence ten rounds.
    overlap = [(a, b) for a in passes for b in passes if a["tid"] == 0 and b["tid"] == 1]
    assert any(a["ts"] < b["ts"] + b["dur"] and b["ts"] < a["ts"] + a["dur"] for a, b in overlap)
