"""Points: what one visit measures, which of them come first, and how much work each is. Pure functions.

kind      num_seqs, tokens           measures
prefill   prompts, tokens of each    attention(prefill), rest, embed
decode    rows, context of each      attention(decode), head; rest(decode) of an encoder-decoder model
engine    requests                   overhead of whole engine iterations, prefill and decode
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from exeplan.core.batch import BLOCK_SIZE, num_blocks_for
from exeplan.core.models.layer_costs import layer_parameters, layer_parameters_read, layer_parameters_used
from exeplan.core.models.model import DTYPE_BYTES, ModelSpec
from exeplan.core.profile import Device

_ENGINE_PROMPT = 32
"""Tokens of each prompt in an engine visit."""
_SHORT_CONTEXT = 16
_FIRST_TOKENS = (1, 2, 3, 4, 8, 16)
_CALL_SECONDS = 20e-6
_EFFICIENCY = 0.6
_COLD_SHARE = 0.02
"""Of a layer's time; where fetching its weights takes less, it does not matter whether they are cached."""
_PREFILL_SEQS = 4


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """One thing to visit; `tokens` is a sequence's."""

    kind: str
    num_seqs: int
    tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt tokens, or context tokens, of all sequences."""
        return self.num_seqs * self.tokens

    @property
    def num_rows(self) -> int:
        """Rows of the flat matrix products."""
        return self.total_tokens if self.kind == "prefill" else self.num_seqs


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Bytes and floating-point operations of a layer, and how long they take about."""

    spec: ModelSpec
    dtype: str
    device: Device
    layer_bytes: int
    encoder_layer_bytes: int = 0
    kv_dtype: str | None = None

    def bytes_left_out(self, copies: int) -> int:
        """Bytes of the weights of all layers except that many of each kind."""
        encoder_layers = max(0, self.spec.num_encoder_layers - copies)
        return (self.spec.num_layers - copies) * self.layer_bytes + encoder_layers * self.encoder_layer_bytes

    def _bytes(self, point: Point) -> int:
        """Of the weights of a layer that does it, those that it reads."""
        if self.spec.experts:
            read = layer_parameters_read(self.spec, point.num_rows) / layer_parameters(self.spec)
            return round(self.layer_bytes * read)
        return self.encoder_layer_bytes or self.layer_bytes if point.kind == "prefill" else self.layer_bytes

    def _parameters(self, point: Point) -> float:
        """With which each token is multiplied."""
        if self.spec.experts or self.spec.quantization:
            return layer_parameters_used(self.spec)
        return self._bytes(point) / DTYPE_BYTES[self.dtype]

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of that many tokens in one layer."""
        return tokens * self.spec.kv_bytes_per_token(self.kv_dtype or self.dtype) // self.spec.num_layers

    def layer_seconds(self, point: Point) -> float:
        """A rough forecast, for planning visits only."""
        spec = self.spec
        causal = point.kind == "prefill" and not spec.is_encoder_decoder
        keys = point.tokens / 2 if causal else point.tokens
        flops = 2.0 * point.num_rows * (self._parameters(point) + 2 * spec.num_heads * spec.head_dim * keys)
        moved = self._bytes(point) + self.kv_bytes(point.total_tokens)
        rates = self.device.flops_per_second, self.device.copy_bytes_per_second
        return (flops / rates[0] + moved / rates[1]) / _EFFICIENCY + _CALL_SECONDS * (point.num_seqs + 5)

    def layers_needed(self, point: Point, copies: int) -> int:
        """How many layers a pass must visit so that each finds the caches as cold as in the whole model."""
        if self.spec.layers_differ:
            return copies
        if point.kind == "prefill":
            fetching = self._bytes(point) / self.device.copy_bytes_per_second
            if fetching < _COLD_SHARE * self.layer_seconds(point):
                return 1
        activations = 8 * point.num_rows * self.spec.hidden_size * DTYPE_BYTES[self.dtype]
        footprint = self._bytes(point) + self.kv_bytes(point.total_tokens) + activations
        # A second layer tells apart what the first one of a decode works out for all.
        least = 2 if point.kind == "decode" else 1
        return min(copies, max(least, -(-4 * self.device.cache_bytes // footprint)))

    def pass_seconds(self, point: Point, copies: int) -> float:
        """Forecast of a pass over those layers."""
        return self.layers_needed(point, copies) * self.layer_seconds(point)


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """How far the profile reaches."""

    max_seqs: int
    max_context: int
    """Of a decoded sequence, before its new token."""
    max_prompt: int
    max_prefill_seqs: int
    kv_tokens: int
    """Slots of the KV cache that the visits share."""

    @property
    def num_blocks(self) -> int:
        """Blocks for those slots, and one more a sequence because lengths are ragged."""
        return num_blocks_for(self.kv_tokens) + self.max_seqs

    def engine_point(self, num_seqs: int) -> Point:
        """Whole iterations over that many requests with short prompts."""
        return Point("engine", num_seqs, min(_ENGINE_PROMPT, (self.max_context + 1) // 2))

    def max_tokens(self, num_seqs: int) -> int:
        """The longest context that `num_seqs` sequences fit in the range."""
        each = self.kv_tokens // num_seqs // BLOCK_SIZE * BLOCK_SIZE - 1
        return max(1, min(self.max_context, each))


def choose_range(
    work: Work, *, copies: int, max_num_seqs: int, max_context: int, memory_bytes: int, pass_seconds: float
) -> Range:
    """The largest range whose keys and values fit the memory, and of which no pass takes longer than `pass_seconds`."""

    def affordable(num_seqs: int, tokens: int) -> bool:
        # A shorter prompt may take longer, because it must visit more layers.
        shorter = (Point("prefill", num_seqs, tokens >> shift) for shift in range(tokens.bit_length()))
        return all(work.pass_seconds(point, copies) <= pass_seconds for point in shorter)

    prompt = max_context
    while prompt > 64 and not affordable(1, prompt):
        prompt //= 2
    prefills = _PREFILL_SEQS if affordable(_PREFILL_SEQS, prompt) and max_num_seqs >= _PREFILL_SEQS else 1
    room = memory_bytes // (copies * work.kv_bytes(1)) // BLOCK_SIZE * BLOCK_SIZE
    needed = max_num_seqs * num_blocks_for(max_context) * BLOCK_SIZE
    while needed > max_num_seqs * 64 and not _decodes_in(work, copies, max_num_seqs, needed, pass_seconds):
        needed //= 2
    kv_tokens = min(needed, room)
    # The cache must hold the longest prompt and one block for every sequence, whatever the forecast says.
    kv_tokens = max(kv_tokens, prefills * prompt, max_num_seqs * num_blocks_for(_ENGINE_PROMPT + 16) * BLOCK_SIZE)
    return Range(
        max_seqs=max_num_seqs,
        max_context=max_context - 1,
        max_prompt=prompt,
        max_prefill_seqs=prefills,
        kv_tokens=num_blocks_for(max(kv_tokens, max_context)) * BLOCK_SIZE,
    )


def _decodes_in(work: Work, copies: int, num_seqs: int, kv_tokens: int, pass_seconds: float) -> bool:
    return work.pass_seconds(Point("decode", num_seqs, kv_tokens // num_seqs), copies) <= pass_seconds


def first_rows(reach: Range) -> list[list[Point]]:
    """The coarse grid, in rows that are only of use whole; the first is what no profile can do without."""
    # Powers of two are the best case of matrix products and attention, and real prompts are rarely that.
    longer = [n - 3 for n in powers(32, reach.max_prompt, 2)]
    prompts = sorted({*(n for n in _FIRST_TOKENS if n < reach.max_prompt), *longer, reach.max_prompt - 1})
    seqs = sorted({1, *powers(4, reach.max_seqs, 4), reach.max_seqs})
    ends = [decode_row(n, reach)[:: len(decode_row(n, reach)) - 1 or 1] for n in sorted({1, reach.max_seqs})]
    engine = [reach.engine_point(n) for n in seqs]
    rows = [
        [Point("prefill", 1, prompts[0]), Point("prefill", 1, prompts[-1]), *chain(*ends), engine[0]],
        *([Point("prefill", 1, n)] for step in (4, 2, 1) for n in prompts[::step]),
        *(decode_row(n, reach) for n in sorted(seqs, key=lambda n: n not in (1, reach.max_seqs))),
        engine,
    ]
    if reach.max_prefill_seqs > 1:
        rows.append([Point("prefill", reach.max_prefill_seqs, n) for n in sorted({*prompts[:-1:2], prompts[-1]})])
    return rows


def decode_row(num_seqs: int, reach: Range) -> list[Point]:
    """`num_seqs` sequences at a coarse row of contexts, up to the longest that fits."""
    longest = reach.max_tokens(num_seqs)
    contexts = sorted({min(_SHORT_CONTEXT, longest), *powers(64, longest, 4), longest})
    return [Point("decode", num_seqs, tokens) for tokens in contexts]


def ragged(num_seqs: int, tokens: int, longest: int) -> list[int]:
    """Lengths around `tokens` that add up to `num_seqs * tokens`, neighbours unlike, none above `longest`.

    Real batches are ragged, and attention over sequences of one length can take short cuts.
    """
    width = min(max(1, tokens // 16), tokens - 1, longest - tokens)
    least = min(1, width)
    half = [max(least, round(width * (index + 1) / (num_seqs // 2))) for index in range(num_seqs // 2)]
    middle = [tokens] * (num_seqs % 2)
    return [tokens + shift for pair in ((-shift, shift) for shift in half) for shift in pair] + middle


def powers(start: int, stop: int, factor: int) -> list[int]:
    """`start`, `start * factor`, ... as long as the next one is not close to `stop`."""
    values = []
    while start * 1.5 < stop:
        values.append(start)
        start *= factor
    return values


def order(points: Mapping[Point, int], seed: int) -> list[Point]:
    """Least measured points first; ties are shuffled by the seed, so that drift does not hit a point twice."""
    shuffled = sorted(points)
    random.Random(seed).shuffle(shuffled)
    return sorted(shuffled, key=lambda point: points[point])
