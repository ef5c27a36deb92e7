"""A quantized checkpoint gives transformers' tokens with the weights that it means, whatever form the device holds."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config, PreTrainedModel
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from exeplan.core.batch import Batch, SequenceState, num_blocks_for
from exeplan.core.models.model import load_model_spec
from exeplan.core.models.sparse_layers import LatentAttention
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.kernels import native
from exeplan.kernels.products.int4_linear import Int4Linear, multiplies_int4
from exeplan.kernels.products.int8_linear import Int8Linear, multiplies_int8
from exeplan.kernels.products.int_linear import IntLinear
from exeplan.profiler.measuring.memory import tensor_bytes
from exeplan.profiler.multi_device.shards import Silent, mixtures_of
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.weights.precision import holding_remarks
from exeplan.runner.compute.weights.shard import whole

from .. import ranks
from .quantized_checkpoints import FAMILIES, LAYOUTS, W8A8, copied, save, save_mxfp4
from .test_models import generate, prompt, serve

CPU = torch.device("cpu")
CASES = [(family, layout) for family in FAMILIES for layout in LAYOUTS]
every_case = pytest.mark.parametrize(("family", "layout"), CASES, ids=[f"{one}-{two}" for one, two in CASES])
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    @functools.cache
    def make(family: str, layout: str) -> tuple[Path, PreTrainedModel]:
        return save(tmp_path_factory.mktemp("checkpoint"), family, {**LAYOUTS, "w8a8": W8A8}[layout])

    return make


def logits(directory: Path, dtype: str) -> Tensor:
    """Of three prompts and of a decode after them."""
    runner = ModelRunner(load_model_spec(str(directory)), dtype=dtype, num_blocks=16)
    texts = {str(size): prompt(size + 1, seed=size) for size in (5, 17, 29)}
    found = []
    for count in range(2):
        rows = tuple(
            SequenceState(
                request_id=name,
                num_prompt_tokens=len(ids) - 1,
                max_output_tokens=2,
                num_output_tokens=count,
                num_blocks=num_blocks_for(len(ids)),
            )
            for name, ids in texts.items()
        )
        found.append(runner.forward(Batch(decode=rows) if count else Batch(prefill=rows), texts))
    return torch.cat(found)


def expected_logits(model: PreTrainedModel) -> Tensor:
    rows = []
    for count in range(2):
        for size in (5, 17, 29):
            rows.append(model(torch.tensor([prompt(size + 1, seed=size)[: size + count]])).logits[0, -1])
    return torch.stack(rows).float()


def error(found: Tensor, expected: Tensor) -> float:
    """Of logits about their mean, which no choice of a token sees."""
    found, expected = (part - part.mean(-1, keepdim=True) for part in (found, expected))
    return float((found - expected).norm() / expected.norm())


@every_case
def test_tokens_equal_those_of_the_weights_that_are_meant(family, layout, checkpoint):
    directory, model = checkpoint(family, layout)
    runner = ModelRunner(load_model_spec(str(directory)), dtype="float32", num_blocks=16)
    requests = [(prompt(3 + 9 * n, seed=n), 6 + 3 * n) for n in range(4)]
    found, _ = serve(runner, Schedule("orca", {"max_num_seqs": 3}), requests, num_blocks=16)
    assert found == [generate(model, ids, count) for ids, count in requests]


@every_case
@torch.no_grad()
def test_bfloat16_is_as_close_as_with_the_weights_that_are_meant(family, layout, checkpoint):
    directory, model = checkpoint(family, layout)
    expected = expected_logits(model)
    assert error(logits(directory, "float32"), expected) < 1e-4
    plain = error(logits(directory.parent / "plain", "bfloat16"), expected)
    flips = 2.0 if "moe" in family else 1.0  # Of routes, where two experts are nearly as likely.
    assert error(logits(directory, "bfloat16"), expected) < 1.5 * flips * plain + 2e-3


def runner_of(directory: Path, dtype: str, *, dummy: bool = False) -> ModelRunner:
    return ModelRunner(load_model_spec(str(directory)), dtype=dtype, num_blocks=1, dummy_weights=dummy)


HELD = {"w8a16": ("float32", Int8Linear), "gptq-4-channel": ("float32", Int8Linear)} | {
    layout: ("bfloat16", Int4Linear)
    for layout in LAYOUTS
    if layout.startswith(("awq", "gptq-4", "packed")) and layout != "gptq-4-channel"
}
"""Layouts that CPUs with torch's products hold as they are."""


@pytest.mark.skipif(not native.multiplies_integers(), reason="a CPU without AVX-512 VNNI, or kernels not built")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if not layout.startswith("fp8")])
def test_the_compiled_products_keep_integers_of_any_layout_in_their_bits(layout, dtype, checkpoint):
    directory, _ = checkpoint("llama", layout)
    runner, plain = runner_of(directory, dtype), runner_of(directory.parent / "plain", dtype)
    assert {type(layer.attention.qkv) for layer in runner.model.layers} == {IntLinear}
    held, whole = (sum(map(tensor_bytes, one.model.layers)) for one in (runner, plain))
    bits, size = runner.spec.quantization.bits, runner.spec.quantization.group_size
    with_groups = bits + 40 / size if size else bits + 1
    assert held < 1.1 * whole * with_groups / torch.finfo(getattr(torch, dtype)).bits
    [remark] = holding_remarks(runner.spec, dtype, CPU)
    assert f"are kept in {bits} bits" in remark


@pytest.mark.skipif(
    not (multiplies_int8(CPU) and multiplies_int4(CPU)), reason="a CPU without products of 8 and 4 bits"
)
@pytest.mark.parametrize("layout", HELD)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_stay_in_their_bits_with_torch(family, layout, checkpoint, monkeypatch):
    monkeypatch.setattr(native, "multiplies_integers", lambda: False)
    directory, _ = checkpoint(family, layout)
    dtype, kind = HELD[layout]
    runner, plain = runner_of(directory, dtype), runner_of(directory.parent / "plain", dtype)
    assert {type(layer.attention.qkv) for layer in runner.model.layers} == {kind}
    held, whole = (sum(map(tensor_bytes, one.model.layers)) for one in (runner, plain))
    bits = 8 if kind is Int8Linear else 4
    assert held < 1.4 * whole * bits / torch.finfo(getattr(torch, dtype)).bits
    [remark] = holding_remarks(runner.spec, dtype, CPU)
    assert f"are kept in {bits} bits" in remark


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["awq-32", "gptq-4-order", "gptq-8", "gptq-4-channel", "w8a16", "fp8-blocks"])
def test_the_bytes_that_are_counted_are_those_that_are_held(layout, dtype, checkpoint):
    """But for the rows of zeros in the last panel of the compiled product with a small vocabulary."""
    directory, _ = checkpoint("qwen3", layout)
    found = runner_of(directory, dtype)
    head = found.model.vocabulary.output
    last_panel = head.weight.nbytes - head.dense().nbytes if head.packed else 0
    assert found.weight_bytes == tensor_bytes(found.model) - tensor_bytes(found.model.angles) - last_panel
    random = runner_of(directory, dtype, dummy=True)
    assert random.weight_bytes == found.weight_bytes


@torch.no_grad()
def test_rows_of_w8a8_are_rounded_to_8_bits_a_token(checkpoint):
    """As its config asks: an oracle that rounds the inputs of these products is much closer than one that does not."""
    directory, model = checkpoint("llama", "w8a8")
    exact = expected_logits(model)
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, inputs: rounded_rows(inputs[0]))
    try:
        found, expected = logits(directory, "float32"), expected_logits(model)
    finally:
        for module in model.modules():
            module._forward_pre_hooks.clear()
    assert 1e-3 < error(exact, expected) < 5e-2
    if native.multiplies_integers() or multiplies_int8(CPU):
        assert error(found, expected) < 0.2 * error(exact, expected)
    else:
        assert error(found, exact) < 1e-4


def rounded_rows(x: Tensor) -> Tensor:
    step = x.abs().amax(-1, keepdim=True) / 127
    return (x / step).round() * step


@pytest.mark.parametrize("layout", ["fp8-blocks", "fp8-uneven-blocks"])
def test_fp8_equals_what_transformers_dequantizes(layout, checkpoint):
    directory, _ = checkpoint("llama", layout)
    stored, name = load_file(directory / "model.safetensors"), "model.layers.1.mlp.down_proj.weight"
    block = json.loads((directory / "config.json").read_text())["quantization_config"]["weight_block_size"]
    expected = _dequantize_fp8_weight(stored[name], stored[f"{name}_scale_inv"], block, torch.float32)
    found = runner_of(directory, "float32").model.layers[1].mlp.down.dense()
    assert torch.equal(found, expected)


@torch.no_grad()
def test_mxfp4_equals_what_transformers_dequantizes(tmp_path):
    directory = save_mxfp4(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    ).eval()
    runner = runner_of(directory, "float32")
    expected = model.model.layers[0].mlp.experts.down_proj
    assert torch.equal(runner.model.layers[0].mlp.experts[0].down.dense(), expected[0].t())
    assert error(logits(directory, "float32"), expected_logits(model)) < 1e-4
    spec = load_model_spec(str(directory))
    for rank in range(2):  # Of experts that are divided each rank reads its own.
        shard = replace(whole(spec), group=Silent(2, rank), whole_experts=True)
        [held, *_] = mixtures_of(ModelRunner(spec, shard=shard, num_blocks=1).model)
        assert len(held.experts) == 2
        assert torch.equal(held.experts[0].down.dense(), expected[2 * rank].t())


WHOLE, UNEVEN = [[0, 3]], [[0, 2], [2, 3]]
SPLIT = ("awq-32", "awq-128", "gptq-4-order", "gptq-8", "gptq-8-order", "packed", "w8a16", "fp8-blocks", "fp8-tensor")


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> tuple[dict[str, str], list[dict[str, Tensor]]]:
    """Directories of models of three layers, and the logits of two tensor-parallel ranks, in one stage and in two."""
    folder = tmp_path_factory.mktemp("split")
    models, jobs = {}, {}
    for family in FAMILIES:
        for layout in SPLIT:
            case = f"{family} {layout}"
            models[case] = str(save(folder / family / layout, family, LAYOUTS[layout], num_layers=3)[0])
            for dtype in ("float32", "bfloat16"):
                cuts = UNEVEN if family == "qwen3" else WHOLE
                jobs[f"{case} {dtype}"] = {"model": models[case], "cuts": cuts, "dtype": dtype}
    return models, ranks.outputs_of_two(folder, jobs)


@pytest.mark.parametrize("layout", SPLIT)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_and_two_stages_are_the_same_model(family, layout, split):
    models, found = split
    case = f"{family} {layout}"
    flips = 5.0 if "moe" in family else 1.0  # Of routes, where two experts are nearly as likely.
    for dtype, limit in (("float32", 1e-4), ("bfloat16", 3e-2 * flips)):
        expected = ranks.logits(ranks.stages(models[case], WHOLE, dtype=dtype))
        assert all(error(one[f"{case} {dtype}"], expected) < limit for one in found)


ZEROS = torch.zeros
BAD = {
    "no scales": ("awq-32", {"scales": None}, r"has no tensor 'model.layers.0.self_attn.q_proj.scales', which"),
    "no zeros": ("gptq-4", {"qzeros": None}, r"has no tensor '.*q_proj.qzeros'"),
    "words of another number": (
        "awq-32", {"qweight": ZEROS(128, 15, dtype=torch.int32)}, r"\[128, 15\], config.json calls for \[128, 16\]"
    ),
    "another group size": ("awq-64", {"scales": ZEROS(4, 128).half()}, r"\[4, 128\], config.json calls for \[2, 128\]"),
    "words of bytes": ("gptq-4", {"qweight": ZEROS(16, 128, dtype=torch.uint8)}, r"32 bits, found torch.uint8"),
    "groups that are not there": (
        "gptq-4", {"g_idx": torch.full((128,), 4, dtype=torch.int32)}, r"g_idx' names groups that are not among the la"
    ),
    "scales that are no numbers": ("w8a16", {"weight_scale": torch.full((128, 1), float("nan"))}, r"are not finite"),
    "no scales of 8 bits": ("w8a16", {"weight_scale": None}, r"is torch.int8 without weight_scale, which its"),
    "no scales of fp8": ("fp8-blocks", {"weight_scale_inv": None}, r"fn without weight_scale_inv or weight_scale, wh"),
    "blocks of another size": (
        "fp8-blocks", {"weight_scale_inv": ZEROS(2, 1)}, r"\[2, 1\], scales of a weight of shape \[128, 128\] have "
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_wrong_is_named_in_a_sentence(case, checkpoint, tmp_path):
    layout, tensors, message = BAD[case]
    directory = copied(checkpoint("llama", layout)[0], tmp_path / "bad", **tensors)
    with pytest.raises(InputError, match=message) as found:
        runner_of(directory, "float32")
    assert "\n" not in str(found.value)


def test_layers_that_are_not_quantized_stand_beside_those_that_are(checkpoint, tmp_path):
    directory, model = checkpoint("llama", "awq-32")
    plain = load_file(directory.parent / "plain" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    mixed = copied(directory, tmp_path / "mixed", qweight=None, qzeros=None, scales=None, weight=plain)
    with torch.no_grad():
        assert error(logits(mixed, "float32"), expected_logits(model)) < 1e-4


@pytest.mark.skipif(not multiplies_int8(CPU), reason="a CPU without such products")
def test_what_latent_attention_dequantizes_is_said(checkpoint):
    spec = load_model_spec(str(checkpoint("llama", "w8a16")[0]))
    latent = LatentAttention(kv_rank=16, query_rank=None, nope_dim=8, rope_dim=8, value_dim=8)
    [plain], [found] = (holding_remarks(one, "float32", CPU) for one in (spec, replace(spec, latent=latent)))
    assert "but for latent attention's, which are dequantized, are kept in 8 bits" in found
    assert "latent" not in plain
