"""The cost model's terms for all passes of a steady cycle at once, as expectations over the lengths of their prompts.

Arrays are over the passes. Not here: real batches (`cost.py`), and which passes a cycle has (`exeplan/policies`).
"""

from collections.abc import Callable

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.layer_costs import num_all_reduces
from exeplan.policies.interface import Cycle
from exeplan.simulator.placement_timings import PlacementTimings, StageKind
from exeplan.simulator.timings import prompt_points


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
        self._together = np.concatenate([self.rows, (self.prompts + self.rows[self.some, None]).ravel()])

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


def host_seconds(cost: PlacementTimings, p: Passes) -> Floats:
    """The overhead of each pass, the same on every stage."""
    extra = np.maximum(cost.prefill_overhead(p.prefills) - cost.overhead(p.prefills), 0.0)
    return np.asarray(cost.overhead(p.rows + p.prefills) + np.where(p.prefills > 0, extra, 0.0))


class PassSeconds:
    """What every pass costs on stages of one tensor-parallel size, host apart."""

    def __init__(self, cost: PlacementTimings, size: int, passes: Passes) -> None:
        self.cost, self.shard, self.passes = cost, cost.shards[size], passes
        self._layers: dict[tuple[int, str], tuple[Floats, Floats]] = {}
        self._sends: dict[str, Floats] = {}
        shard, p = self.shard, passes
        attends = np.where(p.rows > 0, shard.decode_attention(p.rows, p.context), 0.0)
        if cost.spec.is_encoder_decoder:
            self._decoder = attends + np.where(p.rows > 0, shard.rest["decode"](p.rows), 0.0)
            self._encoder = self._prefill_attention() + p.expected_of_prompts(shard.rest["prefill"])
        else:
            rest = np.where(p.prefills > 0, p.expected(shard.rest["prefill"]), shard.rest["decode"](p.rows))
            self._decoder = rest + attends + self._prefill_attention()
            self._encoder = np.zeros(len(p.rows))

    def stage_seconds(self, kind: StageKind) -> Floats:
        """On a stage of this kind; 0 for passes of the other phase where phases have stages of their own."""
        p = self.passes
        link = (kind.size, kind.all_reduce)
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
        if kind.send:
            if kind.send not in self._sends:
                self._sends[kind.send] = self._send_seconds(kind.send)
            seconds = seconds + self._sends[kind.send]
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

    def _layer_seconds(self, link: tuple[int, str]) -> tuple[Floats, Floats]:
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

    def _send_seconds(self, link: str) -> Floats:
        send = self.cost.sends[link]
        return self.passes.expected(lambda tokens: send(self.cost.activation_bytes(tokens)))
