"""Quantized checkpoints of random models, packed here value by value, and the same models with the weights they mean.

The packing follows the formats' descriptions in plain integers and shares no code with what reads it.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 199
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 256, "max_position_embeddings": 128, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen3": SIZES,
    "qwen3_moe": {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}
Layer = tuple[dict[str, torch.Tensor], np.ndarray]
"""The tensors of a quantized layer, by what is added to its name, and the weight `[O, I]` that they mean."""
Packer = Callable[[np.ndarray, np.random.Generator], Layer]


def words(values: np.ndarray, bits: int) -> torch.Tensor:
    """Along the last dimension, the first value of a word in its lowest bits."""
    per_word = 32 // bits
    found = np.zeros((*values.shape[:-1], -(-values.shape[-1] // per_word)), dtype=np.uint32)
    for index in range(values.shape[-1]):
        found[..., index // per_word] |= values[..., index].astype(np.uint32) << np.uint32(bits * (index % per_word))
    return torch.from_numpy(found.view(np.int32).copy())


def asymmetric(weight: np.ndarray, groups: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values `[O, I]`, scales and zeros `[O, G]` of weights whose inputs are of these groups; scales fit 16 bits."""
    count, top = int(groups.max()) + 1, 2**bits - 1
    scales, zeros = np.zeros((len(weight), count), np.float32), np.zeros((len(weight), count), np.int64)
    values = np.zeros(weight.shape, np.int64)
    for group in range(count):
        part = weight[:, groups == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        scales[:, group] = np.maximum((high - low) / top, 1e-4).astype(np.float16)
        zeros[:, group] = np.clip(np.round(-low / scales[:, group]), 0, top)
        rounded = np.round(part / scales[:, group, None]) + zeros[:, group, None]
        values[:, groups == group] = np.clip(rounded, 0, top)
    return values, scales, zeros


def meant(values: np.ndarray, scales: np.ndarray, zeros: np.ndarray, groups: np.ndarray) -> np.ndarray:
    return ((values - zeros[:, groups]) * scales[:, groups]).astype(np.float32)


def half(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float16))


def awq(size: int) -> Packer:
    def pack(weight: np.ndarray, _draw: np.random.Generator) -> Layer:
        groups = np.arange(weight.shape[1]) // size
        values, scales, zeros = asymmetric(weight, groups, 4)
        order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
        mixed = [
            part.T.reshape(part.shape[1], -1, 8)[:, :, order].reshape(part.shape[1], -1) for part in (values, zeros)
        ]
        tensors = {"qweight": words(mixed[0], 4), "qzeros": words(mixed[1], 4), "scales": half(scales.T)}
        return tensors, meant(values, scales, zeros, groups)

    return pack


def gptq(bits: int, size: int | None, *, ordered: bool = False, first_format: bool = True) -> Packer:
    def pack(weight: np.ndarray, draw: np.random.Generator) -> Layer:
        inputs = weight.shape[1]
        groups = np.arange(inputs) // (size or inputs)
        if ordered:
            groups = np.random.default_rng(inputs).permutation(groups)
        values, scales, zeros = asymmetric(weight, groups, bits)
        stored = (zeros - 1) % 2**bits if first_format else zeros
        tensors = {
            "qweight": words(values, bits).t().contiguous(),
            "qzeros": words(stored.T, bits),
            "scales": half(scales.T),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return tensors, meant(values, scales, zeros, groups)

    return pack


def packed(size: int, *, symmetric: bool) -> Packer:
    def pack(weight: np.ndarray, _draw: np.random.Generator) -> Layer:
        groups = np.arange(weight.shape[1]) // size
        values, scales, zeros = asymmetric(weight, groups, 4)
        tensors = {"weight_shape": torch.tensor(weight.shape), "weight_packed": words(values, 4)}
        if symmetric:
            zeros = np.full_like(zeros, 8)
        else:
            tensors["weight_zero_point"] = words(zeros.T, 4).t().contiguous()
        tensors["weight_scale"] = half(scales)
        return tensors, meant(values, scales, zeros, groups)

    return pack


def int8(weight: np.ndarray, _draw: np.random.Generator) -> Layer:
    scales = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
    values = np.clip(np.round(weight / scales), -128, 127)
    tensors = {"weight": torch.from_numpy(values.astype(np.int8)), "weight_scale": torch.from_numpy(scales)}
    return tensors, (values * scales).astype(np.float32)


def fp8(height: int | None, width: int | None, name: str = "weight_scale_inv") -> Packer:
    def pack(weight: np.ndarray, _draw: np.random.Generator) -> Layer:
        outputs, inputs = weight.shape
        tall, wide = height or outputs, width or inputs
        scales = np.zeros((-(-outputs // tall), -(-inputs // wide)), np.float32)
        values, found = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn), np.zeros_like(weight)
        for row, column in np.ndindex(scales.shape):
            part = (slice(row * tall, (row + 1) * tall), slice(column * wide, (column + 1) * wide))
            scales[row, column] = np.abs(weight[part]).max() / 448
            values[part] = torch.from_numpy(weight[part] / scales[row, column]).to(torch.float8_e4m3fn)
            found[part] = values[part].float().numpy() * scales[row, column]
        stored = scales if height else scales.reshape(())
        return {"weight": values, name: torch.from_numpy(stored.copy())}, found

    return pack


def compressed(form: str, weights: dict[str, Any], rows: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


INT4 = {"num_bits": 4, "type": "int", "strategy": "group"}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "checkpoint_format": "gptq"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
LAYOUTS: dict[str, tuple[dict[str, Any], Packer]] = {
    "awq-128": ({**AWQ, "group_size": 128}, awq(128)),
    "awq-64": ({**AWQ, "group_size": 64}, awq(64)),
    "awq-32": ({**AWQ, "group_size": 32}, awq(32)),
    "gptq-4": ({**GPTQ, "bits": 4, "group_size": 32, "desc_act": False}, gptq(4, 32)),
    "gptq-4-order": ({**GPTQ, "bits": 4, "group_size": 32, "desc_act": True}, gptq(4, 32, ordered=True)),
    "gptq-4-v2": (
        {**GPTQ, "bits": 4, "group_size": 64, "checkpoint_format": "gptq_v2"}, gptq(4, 64, first_format=False)
    ),
    "gptq-8": ({**GPTQ, "bits": 8, "group_size": 128, "desc_act": False}, gptq(8, 128)),
    "gptq-8-order": ({**GPTQ, "bits": 8, "group_size": 32, "desc_act": True}, gptq(8, 32, ordered=True)),
    "gptq-4-channel": ({**GPTQ, "bits": 4, "group_size": -1}, gptq(4, None)),
    "packed": (
        compressed("pack-quantized", {**INT4, "group_size": 32, "symmetric": False}), packed(32, symmetric=False)
    ),
    "packed-symmetric": (
        compressed("pack-quantized", {**INT4, "group_size": 64, "symmetric": True}), packed(64, symmetric=True)
    ),
    "w8a16": (compressed("int-quantized", INT8), int8),
    "fp8-blocks": ({**FP8, "weight_block_size": [128, 128]}, fp8(128, 128)),
    "fp8-uneven-blocks": ({**FP8, "weight_block_size": [48, 80]}, fp8(48, 80)),
    "fp8-tensor": ({**FP8, "activation_scheme": "static"}, fp8(None, None, "weight_scale")),
}  # fmt: skip
W8A8 = (compressed("int-quantized", INT8, TOKENS), int8)


def is_quantized(name: str) -> bool:
    """Whether a tensor is the weight of a linear layer that publishers quantize: not a router, not the head."""
    return name.endswith("_proj.weight")


def save(
    folder: Path, family: str, layout: tuple[dict[str, Any], Packer], *, num_layers: int = 2, seed: int = 0
) -> tuple[Path, PreTrainedModel]:
    """The directory of a quantized checkpoint, and transformers' model with the weights that it means."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[family](**{**FAMILIES[family], "num_hidden_layers": num_layers})
    )
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    plain, quantized = folder / "plain", folder / "quantized"
    model.save_pretrained(plain)
    both = dict(packed_tensors(load_file(plain / "model.safetensors"), layout[1]))
    quantized.mkdir()
    for side, directory in enumerate((quantized, plain)):
        tensors = {name: pair[side] for name, pair in both.items() if pair[side] is not None}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": layout[0]}))
    return quantized, AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()


def packed_tensors(
    plain: dict[str, torch.Tensor], pack: Packer
) -> Iterator[tuple[str, tuple[torch.Tensor | None, torch.Tensor | None]]]:
    """Each tensor of either checkpoint: what the quantized one has, and the plain one."""
    draw = np.random.default_rng(0)
    for name, tensor in plain.items():
        if not is_quantized(name):
            yield name, (tensor, tensor)
            continue
        layer, weight = pack(tensor.float().numpy(), draw)
        below = name.removesuffix("weight")
        found = {f"{below}{part}": value.contiguous() for part, value in layer.items()}
        for part, value in found.items():
            yield part, (value, torch.from_numpy(weight) if part == name else None)
        if name not in found:
            yield name, (None, torch.from_numpy(weight))


def save_mxfp4(folder: Path) -> Path:
    """A gpt-oss whose experts are in MXFP4, as it is published."""
    torch.manual_seed(0)
    sizes = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "intermediate_size": 64}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gpt_oss"](**sizes))
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    draw, tensors = np.random.default_rng(0), {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = tensor.bfloat16()
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.from_numpy(draw.integers(0, 256, (*shape, 16), dtype=np.uint8))
        tensors[f"{name}_scales"] = torch.from_numpy(draw.integers(122, 126, shape, dtype=np.uint8))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    how = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", "quantization_config": how}))
    return folder


def copied(directory: Path, to: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy of a checkpoint with some tensors replaced, or left out where None, by what is added to a layer's name."""
    shutil.copytree(directory, to)
    found = load_file(to / "model.safetensors")
    layer = "model.layers.0.self_attn.q_proj."
    for part, tensor in tensors.items():
        found.pop(layer + part, None)
        if tensor is not None:
            found[layer + part] = tensor
    save_file(found, to / "model.safetensors", metadata={"format": "pt"})
    return to
