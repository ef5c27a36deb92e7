"""Which implementation of the kernels serves a device and a dtype: Triton's on a GPU, plain PyTorch elsewhere.

The runner asks once, when it loads a model, and calls what it is given; nothing else compares devices. The CPU's own
fast paths, `attention.py` and `linear.py`, are not among them: they take other arguments, because what is fast on a CPU
is another layout of the same work.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from exeplan.kernels import (
    activation,
    fp8,
    kv_blocks,
    kv_slots,
    language,
    mixed_attention,
    most_likely,
    norm,
    paged_attention,
    ragged_attention,
    rotary,
    sampling,
    slot_attention,
)


class Kernels(NamedTuple):
    """Functions of one implementation; what they take and give is written where they are defined."""

    paged_attention: Callable[..., Tensor]
    ragged_attention: Callable[..., Tensor]
    mixed_attention: Callable[..., Tensor]
    slot_attention: Callable[..., Tensor]
    store_slots: Callable[..., None]
    gather_slots: Callable[..., Tensor]
    scatter_slots: Callable[..., None]
    move_blocks: Callable[..., None]
    rms_norm: Callable[..., Tensor]
    layer_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., Tensor]
    add_layer_norm: Callable[..., Tensor]
    rotate: Callable[..., None]
    gated_activation: Callable[..., Tensor]
    plain_activation: Callable[..., Tensor]
    quantize_rows: Callable[[Tensor], tuple[Tensor, Tensor]]
    most_likely: Callable[..., tuple[Tensor, Tensor]]
    draw: Callable[..., tuple[Tensor, Tensor]]


TRITON = Kernels(
    paged_attention=paged_attention.paged_attention,
    ragged_attention=ragged_attention.ragged_attention,
    mixed_attention=mixed_attention.mixed_attention,
    slot_attention=slot_attention.slot_attention,
    store_slots=kv_slots.store_slots,
    gather_slots=kv_slots.gather_slots,
    scatter_slots=kv_slots.scatter_slots,
    move_blocks=kv_blocks.move_blocks,
    rms_norm=norm.rms_norm,
    layer_norm=norm.layer_norm,
    add_rms_norm=norm.add_rms_norm,
    add_layer_norm=norm.add_layer_norm,
    rotate=rotary.rotate,
    gated_activation=activation.gated_activation,
    plain_activation=activation.plain_activation,
    quantize_rows=fp8.quantize_rows,
    most_likely=most_likely.most_likely,
    draw=sampling.draw,
)
REFERENCE = Kernels(
    paged_attention=paged_attention.paged_attention_reference,
    ragged_attention=ragged_attention.ragged_attention_reference,
    mixed_attention=mixed_attention.mixed_attention_reference,
    slot_attention=slot_attention.slot_attention_reference,
    store_slots=kv_slots.store_slots_reference,
    gather_slots=kv_slots.gather_slots_reference,
    scatter_slots=kv_slots.scatter_slots_reference,
    move_blocks=kv_blocks.move_blocks_reference,
    rms_norm=norm.rms_norm_reference,
    layer_norm=norm.layer_norm_reference,
    add_rms_norm=norm.add_rms_norm_reference,
    add_layer_norm=norm.add_layer_norm_reference,
    rotate=rotary.rotate_reference,
    gated_activation=activation.gated_activation_reference,
    plain_activation=activation.plain_activation_reference,
    quantize_rows=fp8.quantize_rows_reference,
    most_likely=most_likely.most_likely_reference,
    draw=sampling.draw_reference,
)


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Triton's on a GPU that has it, for the dtypes that models run in; PyTorch's for anything else."""
    on_triton = device.type == "cuda" and language.AVAILABLE and not language.INTERPRETED
    return TRITON if on_triton and dtype in (torch.float32, torch.float16, torch.bfloat16) else REFERENCE
