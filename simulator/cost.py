"""Cost model: a Profile turned into seconds for one pass over the stages of a placement.

    stage = overhead(rows) + layers * (rest(tokens) + attention(prefill) + attention(decode) + all-reduces(tokens))
          + embed(tokens) on the first stage + head(rows) on the last + send(tokens) to the next

Ragged batches cost by total context, not by batch * max. An encoder-decoder model prefills on its encoder layers and
decodes on the others. Between measured points times are interpolated (`curves.py`); `beyond` names every axis on which
an estimate left what was measured.

Not here: measuring (`profiler/`) and what happens when (`closed_form.py`, `replay.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np

from exeplan.cluster import Cluster
from exeplan.errors import InputError
from exeplan.length_law import LengthLaw
from exeplan.plan import Placement, single_stage
from exeplan.policies import Cycle, Floats
from exeplan.profile import Measurement, Profile
from exeplan.scheduling import Batch
from exeplan.shape import activation_bytes, layer_kv_bytes_per_token, num_all_reduces
from exeplan.simulator.curves import Curve, curve_of, surface_of
from exeplan.simulator.memory import PlacementMemory

_QUADRATURE = 9
"""Points of the prompt-length law at which a pass with prefills is timed."""
_LAWS = 256
"""Prompt laws whose mean attention is remembered: a search asks for the same ones again and again."""
_MANY_PROMPTS = 2048
"""Prompts of one batch beyond which the attention of each is not timed on a curve for that very number."""


class Shard:
    """One device's share of a layer, and of what stands around the layers, at one tensor-parallel size."""

    def __init__(self, rows: Sequence[Measurement], size: int) -> None:
        own = [m for m in rows if m.tensor_parallel_size == size]
        if not any(m.op == "rest" for m in own):
            sizes = sorted({m.tensor_parallel_size for m in rows if m.op == "rest"})
            raise InputError(f"the profile has tensor-parallel sizes {', '.join(map(str, sizes))}, not {size}")
        around = {op: [m for m in own if m.op == op] or [m for m in rows if m.op == op] for op in ("embed", "head")}
        self.rest = {phase: curve_of(_either(own, "rest", phase), "num_tokens") for phase in ("prefill", "decode")}
        self.embed = curve_of(around["embed"], "num_tokens")
        self.head = curve_of(around["head"], "num_seqs")
        self.decode_attention = surface_of(_either(own, "attention", "decode"), "context_tokens")
        self.prefill_attention = surface_of(_either(own, "attention", "prefill"), "num_tokens")
        # A replay asks for one scalar at a time, thousands of times: the same interpolation without numpy's overhead.
        self.decode_curve = cache(self.decode_attention.at_num_seqs)
        self.prefill_curve = cache(self.prefill_attention.at_num_seqs)
        self.prefill_shares = lru_cache(_LAWS)(self._prefill_shares)

    def _prefill_shares(self, prompts: LengthLaw) -> Floats:
        """The mean attention over a law of prompts, on the curve of each measured number of sequences."""
        return np.array([curve(_points(prompts)).mean() for curve in self.prefill_attention.curves])


class Timings:
    """A profile's measurements as curves; made once, used by every placement."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.rows = [replace(m, seconds=m.seconds * profile.calibration) for m in profile.measurements]
        overheads = [m for m in self.rows if m.op == "overhead"]
        self.overhead = curve_of([m for m in overheads if m.phase != "prefill"], "num_seqs")
        self.prefill_overhead = curve_of([m for m in overheads if m.phase != "decode"], "num_seqs")
        self.shard = cache(self._shard)
        self.all_reduce = cache(self._all_reduce)
        self.send = cache(self._send)

    def _shard(self, size: int) -> Shard:
        return Shard(self.rows, size)

    def _all_reduce(self, size: int, link: str) -> Curve | None:
        rows = [m for m in self.rows if (m.op, m.phase, m.tensor_parallel_size) == ("all_reduce", link, size)]
        return curve_of(rows, "bytes") if rows else None

    def _send(self, link: str) -> Curve | None:
        rows = [m for m in self.rows if (m.op, m.phase) == ("send", link)]
        return curve_of(rows, "bytes") if rows else None


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the time of a stage depends on; stages of one kind take equal time."""

    size: int
    layers: int
    encoder_layers: int
    first: bool
    last: bool
    phase: str
    all_reduce: str
    """`intra`, `inter`, or '' for a stage of one device."""
    send: str
    """The link to the next stage, '' for the last one."""


class CostModel:
    """Seconds of passes on the stages of a placement; a pure function of profile, placement and cluster.

    Without a placement: all layers on one device. Raises InputError when the profile lacks a tensor-parallel size, or
    profile and cluster a link, that the placement needs.
    """

    def __init__(
        self, timed: Profile | Timings, placement: Placement | None = None, cluster: Cluster | None = None
    ) -> None:
        self.timings = timed if isinstance(timed, Timings) else Timings(timed)
        self.profile, self.cluster = self.timings.profile, cluster
        self.spec = spec = self.profile.model
        self.placement = placement or single_stage(spec)
        self.first_token_from_prefill = spec.first_token_from_prefill
        self.prefill_stages = tuple(i for i, s in enumerate(self.placement) if s.phase != "decode")
        self.decode_stages = tuple(i for i, s in enumerate(self.placement) if s.phase != "prefill")
        self.shards = {size: self.timings.shard(size) for size in {s.tensor_parallel_size for s in self.placement}}
        self.overhead, self.prefill_overhead = self.timings.overhead, self.timings.prefill_overhead
        self._kinds = [self._kind(i) for i in range(len(self.placement))]
        self._all_reduce = {
            (k.size, k.all_reduce): self._all_reduce_curve(k.size, k.all_reduce) for k in self._kinds if k.all_reduce
        }
        self._send = {k.send: self._send_curve(k.send) for k in self._kinds if k.send}
        self.times_repeats = len(self.placement) == 1
        """Whether equal batches in a row may be timed together."""
        self._fixed_decode = cache(self._fixed_decode_seconds)
        self.memory = PlacementMemory(self.profile, self.placement)

    def seconds(self, cycle: Cycle) -> Floats:
        """Each expected pass of a steady cycle on each stage, [stages, passes], given that it occurs."""
        passes = _Passes(cycle)
        works = {size: _Work(self, size, passes) for size in self.shards}
        by_kind = {kind: works[kind.size].stage_seconds(kind) for kind in set(self._kinds)}
        return np.stack([by_kind[kind] for kind in self._kinds])

    def batch_seconds(self, batch: Batch) -> float:
        """One real batch through all stages that run it."""
        return sum(self.stage_seconds(batch))

    def stage_seconds(self, batch: Batch) -> list[float]:
        """One real batch (the replay's and the runner's) on each of the stages that run it, in order."""
        kinds = self._of_phase(batch.phase)
        rows = len(batch.decode)
        context = sum(s.num_prompt_tokens + s.num_output_tokens for s in batch.decode)
        context -= rows if self.first_token_from_prefill else 0  # The newest token is in no cache yet.
        if batch.prefill:
            return self._mixed_seconds(batch, kinds, context)
        per_layer = {size: shard.decode_curve(rows).at(context / rows) for size, shard in self.shards.items()}
        fixed = self._fixed_decode(rows)
        return [fixed[kind] + kind.layers * per_layer[kind.size] for kind in kinds]

    def repeated_seconds(self, batch: Batch, count: int) -> Floats:
        """Of so many passes of one decode batch in a row, where one stage does everything.

        Every row but finished ones, which are only kept, has one more token in the cache each time.
        """
        (kind,), rows = self._kinds, len(batch.decode)
        context = sum(s.num_prompt_tokens + s.num_output_tokens for s in batch.decode)
        context -= rows if self.first_token_from_prefill else 0
        growth = sum(not s.finished for s in batch.decode) * np.arange(count)
        curve = self.shards[kind.size].decode_curve(rows)
        return self._fixed_decode(rows)[kind] + kind.layers * curve((context + growth) / rows)

    def handover_seconds(self, num_tokens: float) -> float:
        """To move the keys and values of so many tokens from the stages that prefill to those that decode.

        Every prefilling device sends its share at the same time.
        """
        devices = [d for i in self.prefill_stages for d in self.placement[i].devices]
        others = [d for i in self.decode_stages for d in self.placement[i].devices]
        size = num_tokens * self.spec.num_layers * layer_kv_bytes_per_token(self.spec, self.profile.dtype)
        link = self._link((*devices, *others))
        return float(self._send_curve(link)(size / len(devices)))

    def beyond(self, cycle: Cycle) -> tuple[str, ...]:
        """Axes on which the estimate of this cycle leaves what was measured, as sentences."""
        points = _points(cycle.prompt_law)
        prompts = cycle.num_prefill * points.mean() if cycle.prompt_tokens is None else cycle.prompt_tokens
        tokens = float(np.max(cycle.num_decode + prompts))
        context = float(np.max(cycle.context_tokens / np.maximum(cycle.num_decode, 1e-12)))
        shard = self.shards[min(self.shards)]
        reached = [
            ("tokens a pass", tokens, shard.rest["prefill"].x[-1]),
            ("rows that decode", float(cycle.num_decode.max()), shard.decode_attention.num_seqs[-1]),
            ("context of a row", context, max(curve.x[-1] for curve in shard.decode_attention.curves)),
            ("prompt length", float(points.max()), max(curve.x[-1] for curve in shard.prefill_attention.curves)),
        ]
        return tuple(
            f"{what} reach {value:.0f}, measured up to {limit:.0f}: extrapolated"
            for what, value, limit in reached
            if value > limit * 1.001
        )

    def _of_phase(self, phase: str) -> list[_Kind]:
        return [kind for kind in self._kinds if kind.phase == phase]

    def _kind(self, number: int) -> _Kind:
        stage = self.placement[number]
        same = [i for i, s in enumerate(self.placement) if s.phase == stage.phase]
        last = number == same[-1]
        return _Kind(
            size=stage.tensor_parallel_size,
            layers=stage.layers[1] - stage.layers[0],
            encoder_layers=stage.encoder_layers[1] - stage.encoder_layers[0],
            first=number == same[0],
            last=last,
            phase=stage.phase,
            all_reduce=self._link(stage.devices) if stage.tensor_parallel_size > 1 else "",
            send="" if last else self._link((stage.devices[-1], self.placement[number + 1].devices[0])),
        )

    def _link(self, devices: tuple[int, ...]) -> str:
        return "intra" if self.cluster is None or self.cluster.same_node(devices) else "inter"

    def _all_reduce_curve(self, size: int, link: str) -> Callable[[Floats | float], Floats]:
        if (timed := self.timings.all_reduce(size, link)) is not None:
            return timed
        if self.cluster is None:
            raise InputError(
                f"the profile times no all_reduce of {size} devices ({link} node); a cluster's links can stand in"
            )
        wire = getattr(self.cluster, link)
        # A ring: every device sends its share twice, but for what it has itself.
        return lambda size_bytes: (
            2 * (size - 1) * (wire.latency + np.asarray(size_bytes) / size / wire.bytes_per_second)
        )

    def _send_curve(self, link: str) -> Callable[[Floats | float], Floats]:
        if (timed := self.timings.send(link)) is not None:
            return timed
        if self.cluster is None:
            raise InputError(f"the profile times no send ({link} node); give a cluster whose links can stand in")
        wire = getattr(self.cluster, link)
        return lambda size_bytes: wire.latency + np.asarray(size_bytes) / wire.bytes_per_second

    def _fixed_decode_seconds(self, rows: int) -> dict[_Kind, float]:
        """What a pass of so many decode rows takes on each kind of stage, but for the attention."""
        return {kind: self._token_seconds(kind, 0.0, rows) + self._row_seconds(kind, rows, 0) for kind in self._kinds}

    def _mixed_seconds(self, batch: Batch, kinds: Sequence[_Kind], context: float) -> list[float]:
        rows, prefills = len(batch.decode), len(batch.prefill)
        spans = [(chunk.start, chunk.end) for chunk in batch.chunks]
        spans = spans or [(0, batch.pad_to or s.num_tokens) for s in batch.prefill]
        prompts = float(sum(end - start for start, end in spans))
        prefill, decode = {}, {}
        for size, shard in self.shards.items():
            curve = shard.prefill_curve(min(prefills, _MANY_PROMPTS))
            prefill[size] = sum(_span(curve, *span) for span in spans) / min(prefills, _MANY_PROMPTS)
            decode[size] = shard.decode_curve(rows).at(context / rows) if rows else 0.0
        return [
            self._token_seconds(kind, prompts, rows)
            + self._row_seconds(kind, rows, prefills)
            + (kind.encoder_layers or (0 if self.spec.is_encoder_decoder else kind.layers)) * prefill[kind.size]
            + kind.layers * decode[kind.size]
            for kind in kinds
        ]

    def _token_seconds(self, kind: _Kind, prompts: float, rows: float) -> float:
        """What depends on the tokens of a pass: products, all-reduces, embedding, and the send to the next stage."""
        shard, reduce = self.shards[kind.size], self._all_reduce.get((kind.size, kind.all_reduce))
        seconds = shard.embed.at(prompts + rows) if kind.first else 0.0
        if kind.send:
            seconds += float(self._send[kind.send](self._bytes(prompts + rows)))
        for layers, phase, tokens in self._work(kind, prompts, rows):
            if tokens:
                layer = shard.rest[phase].at(tokens)
                if reduce:
                    count = num_all_reduces(self.spec, encoder=self.spec.is_encoder_decoder and phase == "prefill")
                    layer += count * float(reduce(self._bytes(tokens)))
                seconds += layers * layer
        return seconds

    def _work(self, kind: _Kind, prompts: float, rows: float) -> tuple[tuple[int, str, float], ...]:
        """(layers, phase, tokens) of the products of a pass: together, or on encoder and decoder layers apart."""
        if self.spec.is_encoder_decoder:
            return (kind.encoder_layers, "prefill", prompts), (kind.layers, "decode", rows)
        return ((kind.layers, "prefill" if prompts else "decode", prompts + rows),)

    def _row_seconds(self, kind: _Kind, rows: float, prefills: float) -> float:
        """Overhead, and the output head. A pass with prefills pays their overhead over that of as many decode rows."""
        everyone = rows + prefills
        seconds = self.overhead.at(everyone)
        if prefills:
            seconds += max(self.prefill_overhead.at(prefills) - self.overhead.at(prefills), 0.0)
        sampled = everyone if self.first_token_from_prefill else rows
        return seconds + (self.shards[kind.size].head.at(sampled) if kind.last and sampled else 0.0)

    def _bytes(self, tokens: Floats | float) -> Floats | float:
        return activation_bytes(self.spec, 1, self.profile.dtype) * tokens


class _Passes:
    """The passes of a cycle with the spread of their prompts: `prompts` is [passes with prefills, points]."""

    def __init__(self, cycle: Cycle) -> None:
        self.rows, self.prefills = cycle.num_decode, cycle.num_prefill
        self.context = cycle.context_tokens / np.maximum(self.rows, 1e-12)
        self.prompt_law = cycle.prompt_law
        self.points = _points(cycle.prompt_law)
        self.some = np.flatnonzero(self.prefills > 0)
        count = self.prefills[self.some]
        mean = float(self.points.mean())
        # The sum of k independent prompts spreads like one prompt times sqrt(k); padded ones are all alike.
        spread = count if cycle.padded else np.sqrt(count)
        prompts = count[:, None] * mean + spread[:, None] * (self.points - mean)
        self.prompts = np.maximum(prompts, count[:, None])
        self.part = np.ones(len(count))
        """Share of the prompts' attention that is due in the pass."""
        self.cut = cycle.prompt_tokens is not None
        if cycle.prompt_tokens is not None:
            self.prompts = np.repeat(cycle.prompt_tokens[self.some, None], len(self.points), axis=1)
            self.part = self.prompts[:, 0] / (count * mean)
        if cycle.prompt_attention is not None:
            self.part = self.part * cycle.prompt_attention[self.some]

    def expected(self, of_tokens: Callable[[Floats], Floats], *, rows: bool = True, prompts: bool = True) -> Floats:
        """The mean of a function of the tokens of each pass: of its decode rows, its prompts, or both together."""
        out = of_tokens(self.rows) if rows else np.zeros(len(self.rows))
        if prompts and len(self.some):
            with_rows = self.rows[self.some, None] if rows else 0.0
            out = np.array(out)
            out[self.some] = of_tokens(self.prompts + with_rows).mean(axis=1)
        return out


class _Work:
    """What every pass of a cycle costs at one tensor-parallel size: arrays over the passes, summed up by kind."""

    def __init__(self, cost: CostModel, size: int, passes: _Passes) -> None:
        self.cost, self.size, self.passes = cost, size, passes
        shard = cost.shards[size]
        self.shard = shard
        apart = cost.spec.is_encoder_decoder
        p = passes
        self.decode_attention = np.where(p.rows > 0, shard.decode_attention(p.rows, p.context), 0.0)
        self.prefill_attention = np.zeros(len(p.rows))
        if len(p.some):
            shares = shard.prefill_shares(p.prompt_law)
            prefills = p.prefills[p.some]
            whole = shard.prefill_attention.blend(prefills, shares) * p.part
            # A chunk costs at least what it would alone, see `_span`; whole prompts are above that.
            alone = shard.prefill_attention(prefills, p.prompts.mean(axis=1) / prefills) if p.cut else 0.0
            self.prefill_attention[p.some] = np.maximum(whole, alone)
        if apart:
            self.decoder_rest = np.where(p.rows > 0, shard.rest["decode"](p.rows), 0.0)
            self.encoder_rest = p.expected(shard.rest["prefill"], rows=False)
        else:
            with_prompts = p.expected(shard.rest["prefill"])
            self.decoder_rest = np.where(p.prefills > 0, with_prompts, shard.rest["decode"](p.rows))
            self.encoder_rest = np.zeros(len(p.rows))

    def stage_seconds(self, kind: _Kind) -> Floats:
        cost, p, spec = self.cost, self.passes, self.cost.spec
        everyone = p.rows + p.prefills
        extra = np.maximum(cost.prefill_overhead(p.prefills) - cost.overhead(p.prefills), 0.0)
        seconds = cost.overhead(everyone) + np.where(p.prefills > 0, extra, 0.0)
        decoder, encoder = self.decoder_rest + self.decode_attention, self.encoder_rest
        if spec.is_encoder_decoder:
            encoder = encoder + self.prefill_attention
        else:
            decoder = decoder + self.prefill_attention
        if reduce := cost._all_reduce.get((kind.size, kind.all_reduce)):
            of_tokens = lambda tokens: np.where(tokens > 0, reduce(cost._bytes(tokens)), 0.0)  # noqa: E731
            both = not spec.is_encoder_decoder
            decoder = decoder + num_all_reduces(spec) * p.expected(of_tokens, prompts=both)
            if not both:
                encoder = encoder + num_all_reduces(spec, encoder=True) * p.expected(of_tokens, rows=False)
        seconds = seconds + kind.layers * decoder + kind.encoder_layers * encoder
        if kind.first:
            seconds = seconds + p.expected(self.shard.embed)
        if kind.last:
            sampled = everyone if cost.first_token_from_prefill else p.rows
            seconds = seconds + np.where(sampled > 0, self.shard.head(sampled), 0.0)
        if kind.send:
            send = cost._send[kind.send]
            seconds = seconds + p.expected(lambda tokens: send(cost._bytes(tokens)))
        if not kind.phase:
            return seconds
        return np.where((p.prefills > 0) == (kind.phase == "prefill"), seconds, 0.0)


def _span(curve: Curve, start: int, end: int) -> float:
    """A prompt's tokens from `start` to `end`, attending to all before: at least what they would cost alone."""
    if start == 0:
        return curve.at(end)
    return max(curve.at(end) - curve.at(start), curve.at(end - start))


def _either(rows: Sequence[Measurement], op: str, phase: str) -> list[Measurement]:
    return [m for m in rows if m.op == op and m.phase in ("", phase)]


@lru_cache(_LAWS)
def _points(prompts: LengthLaw) -> Floats:
    """A few points of the prompt law with equal weights, exact in the mean."""
    return prompts.slice_means(_QUADRATURE)
