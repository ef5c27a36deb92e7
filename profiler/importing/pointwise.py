"""Kernels that no table times: norms, rotary embedding, activation, embedding lookup and sampling.

They move bytes and hardly compute: the datasheet's `elementwise_latency` and `elementwise_efficiency` time them.
"""

from exeplan.core.models.model import DTYPE_BYTES, ModelSpec
from exeplan.profiler.datasheets.roofline import Datasheet, elementwise_seconds

_ELEMENT_BYTES = DTYPE_BYTES["bfloat16"]
_LOGIT_BYTES = DTYPE_BYTES["float32"]
_SAMPLING_PASSES = 4
"""Over the logits of the whole vocabulary in float32: temperature, softmax (twice) and the draw."""


def layer_seconds(sheet: Datasheet, spec: ModelSpec, num_tokens: float, degree: int) -> float:
    """One device's shard of a decoder-only layer: two norms with the residual's sum, rotary embedding, activation."""
    rotated = 2 * spec.head_dim * (spec.num_heads + spec.num_kv_heads) / degree
    # An experts' table has their activation.
    inner = spec.experts.shared_width if spec.experts else spec.intermediate_size
    activated = (3 if spec.gated_mlp else 2) * inner / degree
    widths = (4 * spec.hidden_size, 4 * spec.hidden_size, rotated, activated)
    return sum(elementwise_seconds(sheet, num_tokens * width * _ELEMENT_BYTES) for width in widths)


def embed_seconds(sheet: Datasheet, spec: ModelSpec, num_tokens: float) -> float:
    """One row of the embedding a token, read and written."""
    return elementwise_seconds(sheet, 2 * num_tokens * spec.hidden_size * _ELEMENT_BYTES)


def sampling_seconds(sheet: Datasheet, spec: ModelSpec, num_seqs: float) -> float:
    """The final norm of the rows, and a token chosen from the logits of each."""
    norm = elementwise_seconds(sheet, 2 * num_seqs * spec.hidden_size * _ELEMENT_BYTES)
    return norm + _SAMPLING_PASSES * elementwise_seconds(sheet, num_seqs * spec.vocab_size * _LOGIT_BYTES)
