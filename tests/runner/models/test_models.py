"""Every family gives the greedy tokens of transformers' `generate`: alone, and in a changing batch."""

import functools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from exeplan.core.batch import Batch, SequenceState, num_blocks_for
from exeplan.core.models.model import load_model_spec, model_spec
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.kernels.select import REFERENCE
from exeplan.runner.compute import model_runner
from exeplan.runner.compute.families import CPU_ONLY, family_names
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.scheduling.scheduler import Scheduler

VOCAB = 199
BASE = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
ROTARY = {**BASE, **NO_SPECIAL, "intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 128}
GPT2 = {**NO_SPECIAL, "vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
EXPERTS = {**ROTARY, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
DEEPSEEK = {
    **BASE,
    **NO_SPECIAL,
    "intermediate_size": 96,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
OPT = {**BASE, "eos_token_id": None, "ffn_dim": 96, "max_position_embeddings": 128, "word_embed_proj_dim": 64}


def scaled(kind: str, **parameters: object) -> dict[str, object]:
    return {**ROTARY, "rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


CASES: dict[str, dict[str, object]] = {
    "llama": {**ROTARY},
    "llama-multi-head": {**ROTARY, "num_key_value_heads": 4},
    "llama-multi-query-biases": {**ROTARY, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "llama-tied-wide-heads": {**ROTARY, "head_dim": 24, "tie_word_embeddings": True},
    "llama-gelu-theta": {**scaled("default", rope_theta=500.0), "hidden_act": "gelu_pytorch_tanh"},
    "llama-linear": scaled("linear", factor=3.0),
    "llama-dynamic": {**scaled("dynamic", factor=4.0), "max_position_embeddings": 48},
    "llama-yarn": scaled("yarn", factor=4.0, original_max_position_embeddings=32),
    "llama-yarn-mscale": scaled(
        "yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=1.1, truncate=False
    ),
    "llama-llama3": scaled(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    ),
    "qwen2": {**ROTARY, "tie_word_embeddings": True},
    "qwen2-window": {**ROTARY, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3": {**ROTARY, "head_dim": 24},
    "qwen3-window-bias": {
        **ROTARY, "head_dim": 16, "attention_bias": True, "use_sliding_window": True, "sliding_window": 5,
        "max_window_layers": 0,
    },
    "mistral": {**ROTARY, "sliding_window": 9},
    "mistral-no-window": {**ROTARY, "sliding_window": None, "head_dim": 32},
    "deepseek_v2": {
        **DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 1,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
            "mscale": 0.7, "mscale_all_dim": 1.1,
        },
    },
    "deepseek_v2-groups-bias": {
        **DEEPSEEK, "q_lora_rank": 24, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 2.5, "attention_bias": True, "n_shared_experts": 1, "first_k_dense_replace": 0,
    },
    "gpt_oss": {
        **ROTARY, "head_dim": 24, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 7,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 32,
        },
    },
    "mixtral": {**ROTARY, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral-window": {**ROTARY, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 72, "decoder_sparse_step": 2},
    "qwen3_moe": {**EXPERTS, "head_dim": 24, "norm_topk_prob": True},
    "qwen3_moe-window-dense-first": {
        **EXPERTS, "head_dim": 16, "mlp_only_layers": [0], "use_sliding_window": True, "sliding_window": 5,
    },
    "opt": {**OPT},
    "opt-post-norm-projected": {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 40},
    "opt-no-bias-gelu": {
        **OPT, "enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu",
    },
    "opt-untied": {**OPT, "tie_word_embeddings": False},
    "gpt2": {**GPT2},
    "gpt2-scaled-inner": {
        **GPT2, "n_inner": 80, "scale_attn_by_inverse_layer_idx": True, "activation_function": "gelu",
    },
    "gpt2-unscaled": {**GPT2, "scale_attn_weights": False, "activation_function": "relu"},
}  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES)
every_path = pytest.mark.parametrize("paged_with", [None, REFERENCE], ids=["cpu", "paged"])
"""Attention by the CPU's fast path, and over blocks as on a GPU."""
PATHS = [(case, path) for case in CASES for path in (None, REFERENCE) if not (path and case.split("-")[0] in CPU_ONLY)]
every_case_on_its_paths = pytest.mark.parametrize(
    ("case", "paged_with"), PATHS, ids=[f"{case}-{'paged' if path else 'cpu'}" for case, path in PATHS]
)
"""Some families run by the CPU's path only."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Saves a random checkpoint of each case once; weights are large enough that no two logits are close."""

    @functools.cache
    def make(case: str) -> tuple[PreTrainedModel, Path]:
        config = CONFIG_MAPPING[case.split("-")[0]](**CASES[case])
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.15)
        directory = tmp_path_factory.mktemp(case)
        model.save_pretrained(directory)
        return model, directory

    return make


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=generator).tolist()


def generate(model: PreTrainedModel, token_ids: list[int], count: int) -> list[int]:
    """The oracle, which is asked once for what several tests want to know."""
    return _generated(model, tuple(token_ids), count)


@functools.cache
def _generated(model: PreTrainedModel, token_ids: tuple[int, ...], count: int) -> list[int]:
    inputs = torch.tensor([token_ids])
    outputs = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return outputs[0, len(token_ids) :].tolist()


def serve(runner: ModelRunner, schedule: Schedule, requests: list[tuple[list[int], int]], num_blocks: int):
    """Greedy outputs of requests that arrive two iterations apart, and the number of preemptions."""
    scheduler = Scheduler(schedule, num_blocks)
    texts = {str(number): list(ids) for number, (ids, _) in enumerate(requests)}
    arrivals = [
        SequenceState(request_id=str(number), num_prompt_tokens=len(ids), max_output_tokens=count)
        for number, (ids, count) in enumerate(requests)
    ]
    iteration = 0
    while arrivals or scheduler.has_work:
        if arrivals and iteration % 2 == 0:
            scheduler.add(arrivals.pop(0))
        iteration += 1
        batch = scheduler.next_batch()
        if batch is None:
            continue
        logits = runner.forward(batch, texts)
        for sequence, token_id in zip((*batch.prefill, *batch.decode), logits.argmax(-1).tolist(), strict=True):
            if sequence.finished:
                continue
            texts[sequence.request_id].append(token_id)
            sequence.num_output_tokens += 1
            sequence.finished = sequence.num_output_tokens == sequence.max_output_tokens
        for sequence in scheduler.complete(batch):
            runner.free(sequence.request_id)
    return [texts[str(n)][len(ids) :] for n, (ids, _) in enumerate(requests)], scheduler.num_preemptions


def test_every_family_has_a_case():
    encoder_decoders = {"marian", "t5"}  # tests/runner/models/test_marian.py, test_t5.py
    assert {case.split("-")[0] for case in CASES} == set(family_names()) - encoder_decoders


@every_case
def test_one_request_equals_generate(case, checkpoint):
    model, directory = checkpoint(case)
    runner = ModelRunner(load_model_spec(str(directory)), dtype="float32", device="cpu", num_blocks=8)
    token_ids = prompt(29, seed=1)
    expected = generate(model, token_ids, 32)
    outputs, _ = serve(runner, Schedule("orca", {"max_num_seqs": 1}), [(token_ids, 32)], num_blocks=8)
    assert outputs == [expected]


@every_case_on_its_paths
def test_sixteen_requests_that_join_and_leave_equal_generate(case, paged_with, checkpoint):
    """With fewer blocks than they need, so that some are preempted and recomputed."""
    model, directory = checkpoint(case)
    lengths = [(1 + (7 * n) % 31, 1 + (5 * n) % 23) for n in range(16)]
    requests = [(prompt(length, seed=n), count) for n, (length, count) in enumerate(lengths)]
    expected = [generate(model, token_ids, count) for token_ids, count in requests]
    runner = ModelRunner(load_model_spec(str(directory)), num_blocks=7, paged_with=paged_with)
    outputs, preemptions = serve(runner, Schedule("rra", {"prefill_batch": 3, "decode_steps": 3}), requests, 7)
    assert outputs == expected
    assert preemptions > 0
    assert runner.cache.free_blocks == 7


@pytest.mark.parametrize(
    "schedule",
    [Schedule("static", {"batch_size": 5}), Schedule("orca", {"max_num_seqs": 6})],
    ids=["static-pads", "orca-mixes"],
)
@every_path
@pytest.mark.parametrize("case", ["llama", "mistral", "opt", "gpt2"])
def test_other_policies_equal_generate(case, schedule, paged_with, checkpoint):
    model, directory = checkpoint(case)
    requests = [(prompt(3 + 5 * n, seed=n), 2 + 3 * (n % 4)) for n in range(8)]
    expected = [generate(model, token_ids, count) for token_ids, count in requests]
    runner = ModelRunner(load_model_spec(str(directory)), num_blocks=32, paged_with=paged_with)
    assert serve(runner, schedule, requests, num_blocks=32)[0] == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ["llama", "mistral", "opt", "gpt2"])
def test_short_dtypes_stay_close_to_float32(case, dtype, checkpoint):
    _, directory = checkpoint(case)
    spec = load_model_spec(str(directory))
    reference, short = (ModelRunner(spec, dtype=kind, device="cpu", num_blocks=4) for kind in ("float32", dtype))
    token_ids = {"a": prompt(20, seed=3)}
    for step in range(3):
        sequence = SequenceState(request_id="a", num_prompt_tokens=17, max_output_tokens=3, num_output_tokens=step)
        sequence.num_blocks = num_blocks_for(sequence.num_tokens)
        batch = Batch(decode=(sequence,)) if step else Batch(prefill=(sequence,))
        expected, logits = reference.forward(batch, token_ids), short.forward(batch, token_ids)
        assert logits.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(logits, expected).min() > 0.99


@pytest.mark.parametrize("case", ["llama-gelu-theta", "llama-linear", "llama-yarn", "llama-llama3"])
def test_old_and_new_spelling_of_rotary_settings_mean_the_same(case):
    new = {**CASES[case], "model_type": "llama"}
    scaling = dict(new["rope_parameters"])
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling | {"type": scaling.pop("rope_type")}}
    assert torch.equal(dummy_logits(old), dummy_logits(new))


@pytest.mark.parametrize("case", ["llama-yarn", "deepseek_v2"])
def test_a_yarn_factor_that_is_left_out_stretches_to_the_positions_of_the_config(case):
    config = {**CASES[case], "model_type": case.split("-")[0]}
    scaling = {key: value for key, value in config["rope_parameters"].items() if key != "factor"}
    assert torch.equal(dummy_logits({**config, "rope_parameters": scaling}), dummy_logits(config))


def dummy_logits(config: dict[str, object]) -> torch.Tensor:
    """Of a prompt, with random weights."""
    spec = model_spec(config, name="tiny")
    runner = ModelRunner(spec, dtype="float32", device="cpu", num_blocks=4, dummy_weights=True)
    sequence = SequenceState(request_id="a", num_prompt_tokens=50, max_output_tokens=1, num_blocks=4)
    return runner.forward(Batch(prefill=(sequence,)), {"a": prompt(50, seed=0)})


def test_random_weights_of_one_seed_are_equal():
    spec = model_spec({**CASES["llama"], "model_type": "llama"}, name="tiny")
    sequence = SequenceState(request_id="a", num_prompt_tokens=5, max_output_tokens=3, num_blocks=1)
    one, same, other = (
        ModelRunner(spec, dtype="float32", device="cpu", num_blocks=1, dummy_weights=True, seed=seed).forward(
            Batch(prefill=(sequence,)), {"a": [1, 2, 3, 4, 5]}
        )
        for seed in (0, 0, 1)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_tied_head_is_counted_twice_only_where_it_is_packed():
    spec = model_spec({**CASES["llama"], "model_type": "llama", "tie_word_embeddings": True}, name="tiny")
    packed = ModelRunner(spec, dtype="float32", device="cpu", num_blocks=1, dummy_weights=True).weight_bytes
    plain = ModelRunner(spec, dtype="float16", device="cpu", num_blocks=1, dummy_weights=True).weight_bytes
    assert packed == 2 * plain + VOCAB * 64 * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma"}, "no model family 'gemma' is run; there are deepseek_v2, gpt2, gpt_oss, llama, "),
        ({"num_experts": 8, "num_experts_per_tok": 2}, "'tiny' of the family llama has experts, which is run only of "),
        ({"quantization_config": {"quant_method": "hqq"}}, "'tiny' is quantized by hqq"),
        ({"vision_config": {}}, "'tiny' is multimodal, and only its part for text can be planned; it cannot be run"),
        ({"head_dim": 15}, "rotary positions need an even number of dimensions, not 15"),
        ({"hidden_act": "snake"}, "no activation 'snake'; there are gelu, "),
        ({"rope_scaling": {"type": "su"}}, "no rotary scaling 'su'; there are default, dynamic, "),
        ({"rope_scaling": {"type": "linear"}}, "rotary scaling 'linear' lacks 'factor'"),
        ({"intermediate_size": -1}, "intermediate_size must be a positive integer, found -1"),
    ],
)
def test_what_is_not_supported_is_named(change, message):
    def load() -> None:
        spec = model_spec({"model_type": "llama", **CASES["llama"], **change}, name="tiny")
        ModelRunner(spec, dtype="float32", device="cpu", num_blocks=1, dummy_weights=True)

    with pytest.raises(InputError, match=message):
        load()


@pytest.mark.parametrize("family", CPU_ONLY)
def test_attention_without_kernels_is_not_run_over_blocks(family):
    spec = model_spec({"model_type": family, **CASES[family]}, name="tiny")
    with pytest.raises(InputError, match=f"'tiny' has {CPU_ONLY[family]}, which runs on a CPU only, not over blocks"):
        ModelRunner(spec, num_blocks=1, dummy_weights=True, paged_with=REFERENCE)


def test_an_unknown_dtype_is_named():
    spec = model_spec({"model_type": "llama", **CASES["llama"]}, name="tiny")
    with pytest.raises(InputError, match="no dtype 'int8'; there are float32, bfloat16, float16"):
        model_runner.ModelRunner(spec, dtype="int8", device="cpu", num_blocks=1)
