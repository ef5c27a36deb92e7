"""Cost model: a Profile turned into seconds for one pass over the stages of a placement.

    stage = overhead(rows) + control(rows) on the first stage, where there are several devices
          + layers * (rest(tokens) + attention(prefill) + attention(decode) + all-reduces(tokens))
          + embed(tokens) on the first stage + head(rows) on the last + send(tokens) to the next
          - saving * (rest(tokens) - rest(rows)) and its all-reduces on the last, where its last layer goes on behind
            the attention with only the rows whose next token is wanted

With attention data parallelism a layer is as slow as the fullest rank, and the routed experts and exchanges with them
come on top (`ranks.py`). Ragged batches cost by total context, not by batch * max. An encoder-decoder model prefills on
its encoder layers and decodes on the others. The parts are a profile's rows (`timings.py`); `beyond` names every axis
on which an estimate left what was measured.

Batches are timed here one by one, the passes of a steady cycle all at once (`passes.py`). Not here: measuring
(`profiler/`) and what happens when (`closed_form.py`, `replay.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.batch import Batch
from exeplan.core.cluster import Cluster
from exeplan.core.handover import num_pieces, num_receivers
from exeplan.core.models.layer_costs import handover_bytes_per_token, num_all_reduces
from exeplan.core.profile import Profile
from exeplan.core.schedule import Placement, Sharding
from exeplan.policies.interface import Cycle, Policy
from exeplan.simulator.curves import Curve
from exeplan.simulator.passes import Passes, PassSeconds, RankPasses, host_seconds
from exeplan.simulator.placement_timings import PlacementTimings, StageKind, SumsOver
from exeplan.simulator.ranks import RankLoad, rank_loads
from exeplan.simulator.timings import Shard, Timings, prompt_points

_MANY_PROMPTS = 2048
"""The largest number of prompts in a batch for which attention has a curve of its own; larger batches use this one."""

_FEW_PASSES = 16
"""Of which numpy would take more time than it saves."""


class CostModel(PlacementTimings):
    """Seconds of passes on the stages of a placement; a pure function of profile, placement and cluster."""

    def __init__(
        self, timed: Profile | Timings, placement: Placement | None = None, cluster: Cluster | None = None
    ) -> None:
        super().__init__(timed, placement, cluster)
        self._fixed_decode = cache(self._fixed_decode_seconds)
        self._decode_stages = cache(self._stages_that_decode)
        self._host_seconds = cache(self._host_seconds_of)
        self._kv_transfer = lru_cache(maxsize=128)(self._kv_transfer_seconds)
        self._all_reduce_seconds = {key: _of_one(curve) for key, curve in self.all_reduces.items()}
        self._send_seconds = {link: _of_one(curve) for link, curve in self.sends.items()}
        self._distinct_kinds = list({id(kind): kind for kind in self.kinds}.values())
        self._kinds_of = {phase: self.of_phase(phase) for phase in {kind.phase for kind in self.kinds}}
        self._distinct_of = {phase: list(dict.fromkeys(kinds)) for phase, kinds in self._kinds_of.items()}

    def for_policy(self, policy: Policy) -> "CostModel":
        """The cost model of what a policy runs: one that keeps finished rows changes its batches less often."""
        timings = self.timings.of_kept_rows if policy.KEEPS_FINISHED_ROWS else self.timings
        return self if timings is self.timings else CostModel(timings, self.placement, self.cluster)

    def seconds(self, cycle: Cycle) -> Floats:
        """Each expected pass of a steady cycle on each stage, [stages, passes], given that it occurs.

        Where n servers share a phase, each of their stages is given an n-th of its time: n equal pipelines side by side
        take as many passes, each in the same time, as one of n times the stages with an n-th of the work.
        """
        passes = Passes(cycle)
        if self.num_ranks > 1:
            ranks = RankPasses(self, cycle, passes)
            on_host = host_seconds(self, ranks)
            found = {id(kind): on_host + ranks.stage_seconds(kind) for kind in self._distinct_kinds}
            return self._shared(found)
        host = host_seconds(self, passes)
        busy = [kind for kind in self._distinct_kinds if passes.any_on(kind.phase)]
        works = {size: PassSeconds(self, size, passes) for size in {kind.size for kind in busy}}
        by_kind = {id(kind): host for kind in self._distinct_kinds}
        by_kind |= {id(kind): host + works[kind.size].stage_seconds(kind) for kind in busy}
        return self._shared(by_kind)

    def _shared(self, seconds: Mapping[int, Floats]) -> Floats:
        """Of every stage, by the identity of its kind, over the servers that share its phase."""
        counts = {phase: len(stages) for phase, stages in self.servers.items()}
        if max(counts.values()) == 1:
            return np.array([seconds[id(kind)] for kind in self.kinds])
        return np.array([seconds[id(kind)] / counts[kind.phase] for kind in self.kinds])

    def batch_seconds(self, batch: Batch) -> float:
        """One real batch through all stages that run it."""
        return sum(self.stage_seconds(batch))

    def stage_seconds(
        self, batch: Batch, num_tokens: int | None = None, decoding: Sequence[tuple[int, int]] | None = None
    ) -> list[float]:
        """One real batch (the replay's and the runner's) on each of the stages that run it, in order.

        `num_tokens` are those of the rows that decode, and `decoding` the rows and tokens of each rank, where they have
        been counted already.
        """
        if self.num_ranks > 1:
            return self._seconds_by_rank(batch, decoding)
        rows = len(batch.decode)
        if num_tokens is None:
            num_tokens = sum(s.num_prompt_tokens + s.num_output_tokens for s in batch.decode)
        # The newest token is in no cache yet.
        context = num_tokens - rows if self.first_token_from_prefill else num_tokens
        if batch.prefill:
            return self._mixed_seconds(batch, context)
        curves, stages = self._decode_stages(batch.phase, rows)
        per_layer = {size: curve.at(context / rows) for size, curve in curves}
        return [fixed + layers * per_layer[size] for fixed, layers, size in stages]

    def repeated_seconds(self, batch: Batch, num_tokens: int, growth: int, count: int) -> list[float]:
        """Seconds of each of `count` repeated passes of one decode batch, where one stage does everything.

        Its rows have `num_tokens` tokens, and together `growth` more in each pass than in the one before: one each,
        except finished rows that a policy keeps.
        """
        (kind,), rows = self.kinds, len(batch.decode)
        context = num_tokens - (rows if self.first_token_from_prefill else 0)
        curve = self.shards[kind.size].decode_curve(rows)
        fixed, layers = self._fixed_decode(rows)[kind], kind.layers
        if count <= _FEW_PASSES:
            return [fixed + layers * curve.at((context + growth * number) / rows) for number in range(count)]
        seconds: list[float] = (fixed + layers * curve((context + growth * np.arange(count)) / rows)).tolist()
        return seconds

    def kv_transfer_seconds(self, num_tokens: float) -> float:
        """Seconds from the end of a prefill until the keys and values of `num_tokens` tokens are at the decode stages.

        Every device that prefills sends its share at the same time, piece by piece (`core/handover.py`), while the next
        layers compute. These take at least their products, so that much of a piece's time, and of an earlier stage's,
        is hidden. Of an encoder-decoder model the encoder's output goes, when the pass has ended.
        """
        return self._kv_transfer(num_tokens)

    def _kv_transfer_seconds(self, num_tokens: float) -> float:
        devices = [d for stage in self.placement if stage.phase for d in stage.devices]
        send = self.send_curve(self.link(tuple(devices)))
        if self.spec.is_encoder_decoder:
            return self._num_encoded_sends() * float(send(self._bytes_per_token * num_tokens))
        late = later = 0.0
        found: dict[tuple[SumsOver, int], tuple[float, float]] = {}
        for number in reversed(self.servers["prefill"][0]):
            kind = self.kinds[number]
            alike = kind.sums, kind.layers
            if alike not in found:
                layer = self._layer_seconds(kind.sums, num_tokens, 0.0)[0]
                width = kind.size.tensor_parallel_size
                found[alike] = kind.layers * layer, self._sent_late(kind.layers, width, num_tokens, layer, send)
            took, after = found[alike]
            late = max(late, after - later)
            later += took
        return late

    def _sent_late(
        self, num_layers: int, width: int, num_tokens: float, layer_seconds: float, send: Callable[[float], Floats]
    ) -> float:
        """Seconds from the end of a stage of so many layers until its `width` devices have sent their last pieces."""
        shares = self.spec.num_kv_shares
        layer_bytes = num_tokens * handover_bytes_per_token(self.spec, self.profile.dtype) / min(width, shares)
        parts = num_pieces(num_layers, layer_bytes)
        layers = num_layers / parts
        receivers = max(self.placement[decoding].tensor_parallel_size for decoding in self.decode_stages)
        piece = num_receivers(shares, width, receivers) * float(send(layers * layer_bytes))
        return piece + (parts - 1) * max(piece - layers * layer_seconds, 0.0)

    def _num_encoded_sends(self) -> int:
        """How often a device that has the encoder's output sends it: it has so many receivers."""
        senders = self.placement[self.prefill_stages[-1]].tensor_parallel_size
        return sum(-(-self.placement[i].tensor_parallel_size // senders) for i in self.decode_stages)

    def beyond(self, cycle: Cycle) -> tuple[str, ...]:
        """Axes on which this cycle exceeds the measured range, as sentences; of each rank, as a profile is."""
        points = prompt_points(cycle.prompt_law)
        prompts = (cycle.packed_slots or cycle.num_prefill) * points.mean()
        prompts = prompts if cycle.prompt_tokens is None else cycle.prompt_tokens
        tokens = float(np.max(cycle.num_decode + prompts))
        context = float(np.max(cycle.context_tokens / np.maximum(cycle.num_decode, 1e-12)))
        rows = min(float(cycle.num_decode.max()), cycle.num_seqs)  # Slots may be more than resident requests.
        tokens, rows = tokens / self.num_ranks, rows / self.num_ranks
        shard = self.shards[min(self.shards)]
        reached = [
            ("tokens a pass", tokens, shard.rest["prefill"].x[-1]),
            ("rows that decode", rows, shard.decode_attention.num_seqs[-1]),
            ("context of a row", context, max(curve.x[-1] for curve in shard.decode_attention.curves)),
            ("prompt length", float(points.max()), max(curve.x[-1] for curve in shard.prefill_attention.curves)),
        ]
        return tuple(
            f"{what} reach {value:.0f}, measured up to {limit:.0f}: extrapolated"
            for what, value, limit in reached
            if value > limit * 1.001
        )

    def _fixed_decode_seconds(self, rows: int) -> dict[StageKind, float]:
        """Seconds of a pass of `rows` decode rows on each kind of stage, without the attention."""
        return dict(self._without_attention(self._distinct_kinds, 0.0, rows, 0))

    def _stages_that_decode(
        self, phase: str, rows: int
    ) -> tuple[list[tuple[Sharding, Curve]], list[tuple[float, int, Sharding]]]:
        """The attention curve of each shard for so many rows, and of each stage its time without the attention, its
        layers and its sharding."""
        fixed = self._fixed_decode(rows)
        curves = [(size, shard.decode_curve(rows)) for size, shard in self.shards.items()]
        return curves, [(fixed[kind], kind.layers, kind.size) for kind in self._kinds_of[phase]]

    def _mixed_seconds(self, batch: Batch, context: float) -> list[float]:
        kinds, rows, prefills = self._kinds_of[batch.phase], len(batch.decode), len(batch.prefill)
        spans = batch.spans
        prompts = 0.0
        for start, end in spans:
            prompts += end - start
        together = min(len(spans), _MANY_PROMPTS)
        prefill, decode = {}, {}
        for size, shard in self.shards.items():
            curve = shard.prefill_curve(together)
            prefill[size] = sum([_span(curve, start, end) for start, end in spans]) / together
            decode[size] = shard.decode_curve(rows).at(context / rows) if rows else 0.0
        apart = self.spec.is_encoder_decoder
        seconds = {
            id(kind): other
            + (kind.encoder_layers or (0 if apart else kind.layers)) * prefill[kind.size]
            + kind.layers * decode[kind.size]
            for kind, other in self._without_attention(self._distinct_of[batch.phase], prompts, rows, prefills)
        }
        return [seconds[id(kind)] for kind in kinds]

    def _seconds_by_rank(self, batch: Batch, decoding: Sequence[tuple[int, int]] | None) -> list[float]:
        """As slow as the fullest rank (`ranks.py`)."""
        loads = rank_loads(batch, self.num_ranks, decoding)
        rows, prompts = sum(load.rows for load in loads), sum(load.prompts for load in loads)
        tokens = max(load.rows + load.prompts for load in loads)
        phase = "prefill" if prompts else "decode"
        host = max(self._host_seconds(load.rows, load.prefills) for load in loads)
        seconds = {}
        for kind in self._distinct_kinds:
            shard, link = self.shards[kind.size], kind.sums
            sums, reduce = num_all_reduces(self.spec), self._all_reduce_seconds.get(link)
            layer = 0.0
            for load in loads:
                own = load.rows + load.prompts
                took = shard.rest[phase].at(own) + (sums * reduce(self._bytes_per_token * own) if reduce else 0.0)
                layer = max(layer, took + self._attention_seconds(shard, load))
            layer += shard.experts[phase].at(rows + prompts) + float(self.exchanges[kind.size, kind.near](tokens))
            around = max(self._around_seconds(kind, load.prompts, load.rows, load.prefills) for load in loads)
            seconds[id(kind)] = host + kind.layers * layer + around
        return [seconds[id(kind)] for kind in self._kinds_of[batch.phase]]

    def _attention_seconds(self, shard: Shard, load: RankLoad) -> float:
        """Of a layer, for the requests of one rank."""
        seconds = 0.0
        if load.spans:
            together = min(len(load.spans), _MANY_PROMPTS)
            curve = shard.prefill_curve(together)
            seconds = sum([_span(curve, *span) for span in load.spans]) / together
        if load.rows:
            # The newest token is in no cache yet.
            seconds += shard.decode_curve(load.rows).at((load.tokens - load.rows) / load.rows)
        return seconds

    def _without_attention(
        self, kinds: Sequence[StageKind], prompts: float, rows: float, prefills: float
    ) -> list[tuple[StageKind, float]]:
        """Seconds of a pass on each of these kinds of stages, without the attention."""
        host = self._host_seconds(rows, prefills)
        layers: dict[SumsOver, tuple[float, float]] = {}
        seconds = []
        for kind in kinds:
            link = kind.sums
            if link not in layers:
                layers[link] = self._layer_seconds(link, prompts, rows)
            decoder, encoder = layers[link]
            around = self._around_seconds(kind, prompts, rows, prefills)
            seconds.append((kind, host + kind.layers * decoder + kind.encoder_layers * encoder + around))
        return seconds

    def _host_seconds_of(self, rows: float, prefills: float) -> float:
        """A pass with prefills pays their overhead over that of as many decode rows."""
        seconds = self.overhead.at(rows + prefills)
        if prefills:
            seconds += max(self.prefill_overhead.at(prefills) - self.overhead.at(prefills), 0.0)
        return seconds

    def _layer_seconds(self, sums_over: SumsOver, prompts: float, rows: float) -> tuple[float, float]:
        """Products and all-reduces of a decoder and of an encoder layer; the former has all where there is no other."""
        rest, reduce = self.shards[sums_over[0]].rest, self._all_reduce_seconds.get(sums_over)

        def seconds(phase: str, tokens: float, num_sums: int) -> float:
            if not tokens:
                return 0.0
            sums = num_sums * reduce(self._bytes_per_token * tokens) if reduce else 0.0
            return rest[phase].at(tokens) + sums

        if not self.spec.is_encoder_decoder:
            return seconds("prefill" if prompts else "decode", prompts + rows, num_all_reduces(self.spec)), 0.0
        encoder = seconds("prefill", prompts, num_all_reduces(self.spec, encoder=True))
        return seconds("decode", rows, num_all_reduces(self.spec)), encoder

    def _around_seconds(self, kind: StageKind, prompts: float, rows: float, prefills: float) -> float:
        """Control and embedding, output head, and the send to the next stage."""
        shard = self.shards[kind.size]
        seconds = shard.embed.at(prompts + rows) if kind.first else 0.0
        if kind.first and self.control:
            seconds += self.control.at(rows + prefills)
        if kind.send:
            seconds += self._send_seconds[kind.send](self._bytes_per_token * (prompts + rows))
        if not kind.last:
            return seconds
        sampled = rows + prefills if self.first_token_from_prefill else rows
        if prompts and self.profile.last_layer_saving:
            seconds -= self._spared_seconds(kind, prompts + rows, sampled)
        return seconds + (shard.head.at(sampled) if sampled else 0.0)

    def _spared_seconds(self, kind: StageKind, tokens: float, sampled: float) -> float:
        """What the last layer does not compute behind its attention, of tokens inside prompts."""
        rest, reduce = self.shards[kind.size].rest["prefill"], self._all_reduce_seconds.get(kind.sums)
        saved = self.profile.last_layer_saving * (rest.at(tokens) - rest.at(sampled))
        if reduce:
            size = self._bytes_per_token
            saved += num_all_reduces(self.spec) * (reduce(size * tokens) - reduce(size * sampled))
        return max(saved, 0.0)


def _of_one(curve: Callable[[Floats | float], Floats]) -> Callable[[float], float]:
    """The same for one number, without numpy's overhead where it is a measured curve."""
    return curve.one if isinstance(curve, Curve) else lambda x: float(curve(x))


def _span(curve: Curve, start: int, end: int) -> float:
    """A prompt's tokens from `start` to `end`, attending to all before: at least what they would cost alone."""
    if start == 0:
        return curve.at(end)
    return max(curve.at(end) - curve.at(start), curve.at(end - start))
