"""The attention kernels as cases of `kernels.py`, against torch's scaled_dot_product_attention or flex attention."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole field uses

from benchmarks.gpu.setting import Case, Setting
from exeplan.core.batch import BLOCK_SIZE
from exeplan.kernels.attention.online_softmax import DistanceBias, PagedKV
from exeplan.kernels.attention.slot_attention import Slots
from exeplan.kernels.attention.spans import Span, Spans


def attention_cases(setting: Setting) -> Iterator[Case]:
    """All cases except flex attention, which torch compiles for long."""
    yield from _decodes(setting, ((2, 48),) if setting.smoke else ((64, 4096), (8, 4096), (1, 32768)))
    yield from _prefills(setting)


def _paged(setting: Setting, batch: int, context: int, dtype: torch.dtype | None = None) -> PagedKV:
    spec, blocks = setting.spec, -(-context // BLOCK_SIZE)
    tables = setting.random(2, spec.num_kv_heads * batch * blocks * BLOCK_SIZE, spec.head_dim, dtype=dtype)
    table_BT = torch.randperm(batch * blocks, device=setting.place).view(batch, blocks).int()
    return PagedKV(tables[0], tables[1], table_BT, spec.num_kv_heads)


def _decodes(setting: Setting, sizes: tuple[tuple[int, int], ...]) -> Iterator[Case]:
    spec, scale = setting.spec, setting.spec.head_dim**-0.5
    for batch, context in sizes:
        heads, kept = spec.num_heads * spec.head_dim, 2 * spec.num_kv_heads * spec.head_dim

        def make(batch: int = batch, context: int = context, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
            cache = _paged(setting, batch, context, dtype)
            end_B = torch.full((batch,), context, dtype=torch.int32, device=setting.place)
            return setting.random(batch, spec.num_heads, spec.head_dim), cache, end_B

        def ours(q_BHD, cache, end_B):
            return setting.kernels.paged_attention(q_BHD, cache, end_B, scale=scale)

        def theirs(q_BHD, cache, end_B):
            """Over contiguous keys and values as torch requires; a paged cache's are not contiguous."""
            k, v = (rows.view(len(q_BHD), spec.num_kv_heads, -1, spec.head_dim) for rows in (cache.keys, cache.values))
            return F.scaled_dot_product_attention(q_BHD[:, :, None], k, v, scale=scale, enable_gqa=True)

        size = setting.torch_dtype.itemsize
        num_bytes = batch * (context * kept + 2 * heads) * size
        flops = 4 * batch * context * heads
        yield Case(f"paged attention, batch {batch}, context {context}", make, ours, theirs, num_bytes, flops)
        if not setting.smoke and setting.in_fp8 and batch == sizes[0][0]:
            in_fp8 = partial(make, dtype=torch.float8_e4m3fn)
            yield Case(f"the same over fp8, batch {batch}, context {context}", in_fp8, ours, None, num_bytes / 2, flops)


def _prefills(setting: Setting) -> Iterator[Case]:
    spec, scale = setting.spec, setting.spec.head_dim**-0.5
    heads, kept = spec.num_heads * spec.head_dim, 2 * spec.num_kv_heads * spec.head_dim
    size = setting.torch_dtype.itemsize

    def qkv(tokens: int) -> tuple[Any, ...]:
        return tuple(setting.random(tokens, n, spec.head_dim) for n in (spec.num_heads, *[spec.num_kv_heads] * 2))

    for number, length in ((4, setting.size(2048, 16)), (1, setting.size(8192, 32))):
        spans = Spans([Span(length)] * number, setting.place)

        def ours(q, k, v, spans=spans):
            return setting.kernels.ragged_attention(q, k, v, spans, scale=scale)

        def theirs(q, k, v, number=number):
            shaped = (x.view(number, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(*shaped, scale=scale, is_causal=True, enable_gqa=True)

        tokens = number * length
        name = f"ragged attention, {number} prompts of {length}"
        moved, flops = tokens * (2 * heads + kept) * size, 2 * tokens * length * heads
        yield Case(name, lambda tokens=tokens: qkv(tokens), ours, theirs, moved, flops)
    chunk, context = setting.size(512, 8), setting.size(7680, 32)
    behind = Spans([Span(chunk, cached=(0, context))], setting.place)

    def cached(q, k, v, cache):
        return setting.kernels.ragged_attention(q, k, v, behind, scale=scale, cache=cache)

    moved = (chunk * (2 * heads + kept) + context * kept) * size
    flops = 2 * chunk * (2 * context + chunk) * heads
    name = f"ragged attention, a chunk of {chunk} behind {context}"
    yield Case(name, lambda: (*qkv(chunk), _paged(setting, 1, context)), cached, None, moved, flops)
    yield from _mixed(setting, qkv, moved_a_token=2 * heads + kept)
    yield from _relative(setting, qkv)
    yield from _packed(setting, qkv)


def _mixed(setting: Setting, qkv: Callable[[int], tuple[Any, ...]], *, moved_a_token: int) -> Iterator[Case]:
    spec, scale = setting.spec, setting.spec.head_dim**-0.5
    prompt, batch, context = setting.size(512, 8), setting.size(64, 2), setting.size(1024, 32)
    spans = Spans([Span(prompt)], setting.place)

    def make(dtype: torch.dtype | None = None) -> tuple[Any, ...]:
        end_B = torch.full((batch,), context, dtype=torch.int32, device=setting.place)
        return *qkv(prompt + batch), _paged(setting, batch, context, dtype), end_B

    def ours(q, k, v, cache, end_B):
        return setting.kernels.mixed_attention(q, k, v, spans, None, cache, end_B, scale=scale)

    def apart(q, k, v, cache, end_B):
        """Two launches, one after the other."""
        setting.kernels.ragged_attention(q[:prompt], k[:prompt], v[:prompt], spans, scale=scale)
        return setting.kernels.paged_attention(q[prompt:], cache, end_B, scale=scale)

    heads, kept = spec.num_heads * spec.head_dim, 2 * spec.num_kv_heads * spec.head_dim
    moved = ((prompt + batch) * moved_a_token + batch * context * kept) * setting.torch_dtype.itemsize
    flops = 2 * prompt**2 * heads + 4 * batch * context * heads
    name = f"mixed attention, {prompt} and {batch} x {context} (against two launches)"
    yield Case(name, make, ours, apart, moved, flops)
    if not setting.smoke and setting.in_fp8:
        less = batch * context * kept * (setting.torch_dtype.itemsize - 1)
        name = f"the same with keys in fp8, {prompt} and {batch} x {context}"
        yield Case(name, partial(make, torch.float8_e4m3fn), ours, apart, moved - less, flops)


def _relative(setting: Setting, qkv: Callable[[int], tuple[Any, ...]]) -> Iterator[Case]:
    """T5's encoder: every token sees all of its prompt, with a bias for each distance."""
    spec, scale, length = setting.spec, 1.0, setting.size(2048, 16)
    spans = Spans([Span(length)] * 4, setting.place)

    def make() -> tuple[Any, ...]:
        return *qkv(4 * length), DistanceBias(setting.random(spec.num_heads, 2 * length - 1), length - 1)

    def ours(q, k, v, bias):
        return setting.kernels.ragged_attention(q, k, v, spans, scale=scale, causal=False, bias=bias)

    def theirs(q, k, v, bias):
        """With the bias of each pair of tokens, which torch requires in full."""
        place = torch.arange(length, device=setting.place)
        mask = bias.at(place[None, :] - place[:, None]).to(q.dtype)
        shaped = (x.view(4, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*shaped, attn_mask=mask, scale=scale, enable_gqa=True)

    heads, kept = spec.num_heads * spec.head_dim, 2 * spec.num_kv_heads * spec.head_dim
    moved, flops = 4 * length * (2 * heads + kept) * setting.torch_dtype.itemsize, 16 * length**2 * heads
    yield Case(f"ragged attention with T5's bias, 4 x {length}", make, ours, theirs, moved, flops)


def _packed(setting: Setting, qkv: Callable[[int], tuple[Any, ...]]) -> Iterator[Case]:
    """TCB's slots, each with four prompts; only what these need is counted."""
    spec, scale = setting.spec, setting.spec.head_dim**-0.5
    number, prompt = setting.size(16, 2), setting.size(128, 4)
    tokens, slot = 4 * number * prompt, 4 * prompt
    prompts = [(start, start + prompt) for start in range(0, tokens, prompt)]
    slots = Slots(tokens, slot, prompts, setting.place)
    own = torch.arange(slot, device=setting.place) // prompt

    def ours(q, k, v):
        return setting.kernels.slot_attention(q, k, v, slots, scale=scale, causal=True)

    def theirs(q, k, v):
        mask = (own[None, :] == own[:, None]).tril()
        shaped = (x.view(number, slot, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*shaped, attn_mask=mask, scale=scale, enable_gqa=True)

    heads, kept = spec.num_heads * spec.head_dim, 2 * spec.num_kv_heads * spec.head_dim
    moved, flops = tokens * (2 * heads + kept) * setting.torch_dtype.itemsize, 2 * tokens * prompt * heads
    name = f"slot attention, {number} slots of 4 x {prompt}"
    yield Case(name, lambda: qkv(tokens), ours, theirs, moved, flops)


def against_flex(setting: Setting) -> Iterator[Case]:
    """Run last, because torch compiles flex attention first; left out of smoke runs, where that takes too long."""
    if setting.smoke:
        return
    spec, scale, length = setting.spec, setting.spec.head_dim**-0.5, 8192
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    spans, flex = Spans([Span(length)], setting.place), _flex(setting, length, scale)

    def qkv() -> tuple[Any, ...]:
        return tuple(setting.random(length, n, spec.head_dim) for n in (heads, kv_heads, kv_heads))

    def ours(q, k, v):
        return setting.kernels.ragged_attention(q, k, v, spans, scale=scale)

    moved = 2 * length * (heads + kv_heads) * spec.head_dim * setting.torch_dtype.itemsize
    flops = 2 * length**2 * heads * spec.head_dim
    yield Case(f"ragged attention against flex attention, {length}", qkv, ours, flex, moved, flops)


def _flex(setting: Setting, length: int, scale: float) -> Callable[..., object]:
    """Torch's flex attention, compiled on its first call, which takes seconds."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=setting.place.type)
    attend = torch.compile(flex_attention)

    def flex(q, k, v):
        shaped = (x.transpose(0, 1)[None] for x in (q, k, v))
        return attend(*shaped, block_mask=mask, scale=scale, enable_gqa=True)

    return flex
