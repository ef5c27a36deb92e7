"""The cost model's terms for all passes of a steady cycle at once, as expectations over the lengths of their prompts.

Arrays are over the passes. Not here: real batches (`cost.py`), and which passes a cycle has (`exeplan/policies`).
"""

from collections.abc import Callable

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.models.layer_costs import num_all_reduces
from exeplan.core.schedule import Sharding
from exeplan.policies.interface import Cycle
from exeplan.simulator.placement_timings import PlacementTimings, StageKind, SumsOver
from exeplan.simulator.ranks import FullestRank
from exeplan.simulator.timings import Shard, prompt_points


class Passes:
    """The passes of a cycle with the spread of their prompts: `prompts` is [passes with prefills, points]."""

    def __init__(self, cycle: Cycle) -> None:
        self.rows, self.prefills = cycle.num_decode, cycle.num_prefill
        self.context = cycle.context_tokens / np.maximum(self.rows, 1e-12)
        self.prompt_law = cycle.prompt_law
        self.some = np.flatnonzero(self.prefills > 0)
        """Passes with prefills."""
        self.spans = np.where(self.prefills > 0, cycle.packed_slots or self.prefills, 0.0)
        """What attention computes: each prompt on its own, or slots that several prompts share."""
        count = self.spans[self.some]
        points = prompt_points(cycle.prompt_law)
        mean = float(points.mean())
        self.cut = cycle.prompt_tokens is not None
        self.part = np.ones(len(count))
        """Share of the prompts' attention that is due in the pass."""
        if cycle.prompt_tokens is not None:
            self.prompts = cycle.prompt_tokens[self.some, None]
            self.part = self.prompts[:, 0] / (count * mean)
        else:
            # The sum of k independent prompts spreads like one prompt times sqrt(k); padded ones are all alike.
            spread = count if cycle.padded else np.sqrt(count)
            self.prompts = np.maximum(count[:, None] * mean + np.outer(spread, points - mean), count[:, None])
        if cycle.prompt_attention is not None:
            self.part = self.part * cycle.prompt_attention[self.some]
        self.sends: dict[str, Floats] = {}
        """Seconds of the send behind a stage by its link, the same for stages of every sharding."""
        self._together = np.concatenate([self.rows, (self.prompts + self.rows[self.some, None]).ravel()])

    def any_on(self, phase: str) -> bool:
        """Whether stages of this phase, '' for both, run any of them."""
        return not phase or (len(self.some) > 0 if phase == "prefill" else len(self.some) < len(self.rows))

    def expected(self, of_tokens: Callable[[Floats], Floats]) -> Floats:
        """The mean of a function of the tokens of each pass, of its decode rows and its prompts together."""
        values = of_tokens(self._together)
        out = np.array(values[: len(self.rows)])
        out[self.some] = self._mean(values[len(self.rows) :])
        return out

    def expected_of_prompts(self, of_tokens: Callable[[Floats], Floats]) -> Floats:
        """The same of its prompts alone, 0 where it has none."""
        out = np.zeros(len(self.rows))
        out[self.some] = self._mean(of_tokens(self.prompts.ravel()))
        return out

    def _mean(self, values: Floats) -> Floats:
        return np.asarray(values.reshape(self.prompts.shape).sum(axis=1) / self.prompts.shape[1])


def host_seconds(cost: PlacementTimings, p: "Passes | RankPasses") -> Floats:
    """The overhead of each pass, the same on every stage."""
    extra = np.maximum(cost.prefill_overhead(p.prefills) - cost.overhead(p.prefills), 0.0)
    return np.asarray(cost.overhead(p.rows + p.prefills) + np.where(p.prefills > 0, extra, 0.0))


class PassSeconds:
    """What every pass costs on stages of one sharding, host apart."""

    def __init__(self, cost: PlacementTimings, size: Sharding, passes: Passes) -> None:
        self.cost, self.shard, self.passes = cost, cost.shards[size], passes
        self._layers: dict[SumsOver, tuple[Floats, Floats]] = {}
        shard, p = self.shard, passes
        attends = np.zeros(len(p.rows))
        if p.rows.any():  # A cycle of separate stages has prefills alone, or none.
            attends = np.where(p.rows > 0, shard.decode_attention(p.rows, p.context), 0.0)
        if cost.spec.is_encoder_decoder:
            self._decoder = attends + np.where(p.rows > 0, shard.rest["decode"](p.rows), 0.0)
            self._encoder = self._prefill_attention() + p.expected_of_prompts(shard.rest["prefill"])
        else:
            rest = shard.rest["decode"](p.rows)
            if len(p.some):
                rest = np.where(p.prefills > 0, p.expected(shard.rest["prefill"]), rest)
            self._decoder = rest + attends + self._prefill_attention()
            self._encoder = np.zeros(len(p.rows))

    def stage_seconds(self, kind: StageKind) -> Floats:
        """On a stage of this kind; 0 for passes of the other phase where phases have stages of their own."""
        p = self.passes
        link = kind.sums
        if link not in self._layers:
            self._layers[link] = self._layer_seconds(link)
        decoder, encoder = self._layers[link]
        seconds = kind.layers * decoder + kind.encoder_layers * encoder
        if kind.first:
            seconds = seconds + p.expected(self.shard.embed)
            if self.cost.control:
                seconds = seconds + self.cost.control(p.rows + p.prefills)
        if kind.last:
            sampled = p.rows + p.prefills if self.cost.first_token_from_prefill else p.rows
            seconds = seconds + np.where(sampled > 0, self.shard.head(sampled), 0.0)
            if self.cost.profile.last_layer_saving:
                seconds = seconds - self._spared_seconds(link, sampled)
        if kind.send:
            if kind.send not in p.sends:
                p.sends[kind.send] = self._send_seconds(kind.send)
            seconds = seconds + p.sends[kind.send]
        if not kind.phase:
            return seconds
        return np.where((p.prefills > 0) == (kind.phase == "prefill"), seconds, 0.0)

    def _prefill_attention(self) -> Floats:
        p, surface = self.passes, self.shard.prefill_attention
        out = np.zeros(len(p.rows))
        if len(p.some):
            prefills = p.spans[p.some]
            whole = surface.blend(prefills, self.shard.prefill_shares(p.prompt_law)) * p.part
            # A chunk costs at least what it would alone, as in a real batch; whole prompts are above that.
            alone = surface(prefills, p.prompts[:, 0] / prefills) if p.cut else 0.0
            out[p.some] = np.maximum(whole, alone)
        return out

    def _layer_seconds(self, link: SumsOver) -> tuple[Floats, Floats]:
        """One decoder and one encoder layer with their all-reduces."""
        reduce, spec, p = self.cost.all_reduces.get(link), self.cost.spec, self.passes
        if reduce is None:
            return self._decoder, self._encoder

        def sums(tokens: Floats) -> Floats:
            return np.where(tokens > 0, reduce(self.cost.activation_bytes(tokens)), 0.0)

        if not spec.is_encoder_decoder:
            return self._decoder + num_all_reduces(spec) * p.expected(sums), self._encoder
        encoder = self._encoder + num_all_reduces(spec, encoder=True) * p.expected_of_prompts(sums)
        return self._decoder + num_all_reduces(spec) * sums(p.rows), encoder

    def _spared_seconds(self, link: SumsOver, sampled: Floats) -> Floats:
        """What the last layer does not compute behind its attention, of tokens inside prompts."""
        cost, p = self.cost, self.passes
        reduce = cost.all_reduces.get(link)

        def behind(tokens: Floats) -> Floats:
            seconds = cost.profile.last_layer_saving * self.shard.rest["prefill"](tokens)
            return seconds + num_all_reduces(cost.spec) * reduce(cost.activation_bytes(tokens)) if reduce else seconds

        return np.where(p.prefills > 0, np.maximum(p.expected(behind) - behind(sampled), 0.0), 0.0)

    def _send_seconds(self, link: str) -> Floats:
        send = self.cost.sends[link]
        return self.passes.expected(lambda tokens: send(self.cost.activation_bytes(tokens)))


class RankPasses:
    """The passes of a cycle on their fullest rank, each of which attends for requests of its own (`ranks.py`)."""

    def __init__(self, cost: PlacementTimings, cycle: Cycle, passes: Passes) -> None:
        self.cost, self.passes = cost, passes
        self.load = load = FullestRank(cycle, cost.num_ranks)
        some = passes.some
        self.shares = load.prompt_share[some, None]
        self.prompts = passes.prompts * self.shares
        """Tokens of the fullest rank's prompts, [passes with prefills, points]."""
        self.with_prompts = self.prompts + load.rows_with_prompts[some, None]
        self.rows = load.rows + 0.0
        self.rows[some] = np.maximum(load.rows_with_prompts[some], 0.0)
        self.prefills = load.prefills

    def stage_seconds(self, kind: StageKind) -> Floats:
        """On a stage of this kind, host apart."""
        p, load, shard = self.passes, self.load, self.cost.shards[kind.size]
        reduce, sums = self.cost.all_reduces.get(kind.sums), num_all_reduces(self.cost.spec)

        def own(tokens: Floats, phase: str) -> Floats:
            """Products and sums of a rank's own tokens."""
            sent = self.cost.activation_bytes(tokens)
            return np.where(tokens > 0, shard.rest[phase](tokens) + (sums * reduce(sent) if reduce else 0.0), 0.0)

        exchange = self.cost.exchanges[kind.size, kind.near]
        layer = np.where(load.rows > 0, shard.decode_attention(load.rows, load.context), 0.0)
        layer = layer + np.where(p.prefills > 0, own(load.rows, "prefill"), own(load.rows, "decode"))
        tokens, some = load.rows + 0.0, p.some
        if len(some):
            begun = load.rows_with_prompts[some]
            attends = np.where(begun > 0, shard.decode_attention(begun, load.context_with_prompts[some]), 0.0)
            prompts = own(self.with_prompts, "prefill").mean(axis=1) + self._prompt_attention(shard)
            layer[some] = np.maximum(layer[some], attends + prompts)
            tokens[some] = np.maximum(tokens[some], self.with_prompts.mean(axis=1))
        experts = np.where(p.prefills > 0, p.expected(shard.experts["prefill"]), shard.experts["decode"](p.rows))
        seconds = kind.layers * (layer + experts + exchange(tokens))
        if kind.first:
            seconds = seconds + shard.embed(tokens)
            if self.cost.control:
                seconds = seconds + self.cost.control(self.rows + self.prefills)
        if kind.last:
            sampled = np.maximum(load.rows, self.rows + self.prefills)
            seconds = seconds + np.where(sampled > 0, shard.head(sampled), 0.0)
        if kind.send:
            seconds = seconds + self.cost.sends[kind.send](self.cost.activation_bytes(tokens))
        return np.asarray(seconds)

    def _prompt_attention(self, shard: Shard) -> Floats:
        """Of passes with prefills, on the rank that has the most."""
        p, surface = self.passes, shard.prefill_attention
        spans = p.spans[p.some]
        share = self.shares[:, 0]
        count = np.maximum(spans * share, np.minimum(spans, 1.0))
        whole = surface.blend(count, shard.prefill_shares(p.prompt_law)) * p.part * (spans * share / count)
        alone = surface(count, self.prompts[:, 0] / count) if p.cut else 0.0
        return np.maximum(whole, alone)
