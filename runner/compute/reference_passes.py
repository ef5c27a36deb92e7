"""Reference passes: a few canonical passes of a model, repeated during a run to know how fast the device is then.

They use the weights of the run's own model, or their own where that is a shard (`with_own_weights`), and a small KV
cache of their own. Only on a CPU: on a GPU a pass would have to wait for those that are queued.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from exeplan.core.batch import Batch, SequenceState, num_blocks_for
from exeplan.core.models.model import ModelSpec
from exeplan.core.profile import ReferencePass
from exeplan.core.runs.machine_speed import MachineSpeed, Restlessness, SpeedSample
from exeplan.runner.compute.blocks.layers import Model
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.passes.kv_cache import KVCache
from exeplan.runner.compute.weights.shard import whole

EVERY_SECONDS = 0.25
MOST_COST = 0.2
"""Of the time between two: longer passes are repeated less often."""
_SEQS, _CONTEXT, _PROMPT = 16, 128, 64


def canonical_passes(*, num_layers: int, longest: int) -> tuple[ReferencePass, ...]:
    """A small decode, a full decode and a prefill through that many layers, within the longest sequence allowed."""
    context, prompt = (max(2, min(size, longest // 2)) for size in (_CONTEXT, _PROMPT))
    shapes = (("decode", 1, context), ("decode", _SEQS, context), ("prefill", 1, prompt))
    return tuple(
        ReferencePass(kind=kind, num_seqs=seqs, num_tokens=tokens, num_layers=num_layers)
        for kind, seqs, tokens in shapes
    )


class RepeatedPasses(Protocol):
    """What a run asks of its reference passes, wherever they are run."""

    at_once: bool
    """Whether `repeat_if_due` runs the pass itself, while nothing else runs."""

    def repeat_if_due(self) -> bool:
        """Has the next pass run if the last one is long enough ago; tells whether it did."""

    def speed_from(self, began: float) -> MachineSpeed:
        """Of what was found since then on the performance counter, its times from there."""

    def take(self) -> MachineSpeed:
        """Of what was found since the last call, which is not kept: for runs without an end."""


class ReferencePasses:
    """Repeats the passes in turn with the weights of a runner; `samples` are what they took."""

    at_once = True

    def __init__(self, runner: ModelRunner, passes: Sequence[ReferencePass], *, model: Model | None = None) -> None:
        """`model` where the runner's own must not be asked, as a probe. Times are on the performance counter."""
        self.passes = tuple(passes)
        self.samples: list[SpeedSample] = []
        most = max((_blocks(one) for one in passes), default=1)
        self._runner = _first_layers(runner, model or runner.model, passes[0].num_layers, num_blocks=most)
        self._batches = [self._batch(one) for one in self.passes]
        self._ended = self._last_cost = 0.0
        self._number = 0
        self._restlessness = Restlessness()
        self._on_cpu_clock = torch.get_num_threads() == 1

    @property
    def speed(self) -> MachineSpeed:
        return MachineSpeed(passes=self.passes, samples=tuple(self.samples))

    @property
    def restless(self) -> bool:
        """Whether the machine's speed moves so much that passes are due sooner."""
        return self._restlessness.share < 1

    def speed_from(self, began: float) -> MachineSpeed:
        """Of the samples since then, their times from there."""
        found = (replace(one, time=one.time - began) for one in self.samples if one.time >= began)
        return replace(self.speed, samples=tuple(found))

    def take(self) -> MachineSpeed:
        """Of the samples since the last call, which are not kept."""
        found, self.samples = self.speed, []
        return found

    def repeat_if_due(self, every: float = EVERY_SECONDS) -> bool:
        """Runs the next pass if the last one is these seconds ago, or longer if it takes long, or less on a restless
        machine; tells whether it did."""
        began = time.perf_counter()
        if began < self._ended + max(every * self._restlessness.share, self._last_cost / MOST_COST):
            return False
        self.repeat()
        return True

    def repeat(self) -> SpeedSample:
        """Runs the next pass."""
        began = time.perf_counter()
        number, self._number = self._number, (self._number + 1) % len(self.passes)
        self._run(number)  # The caches are full of what the run did: only the second one is alike each time.
        seconds, wall = self._run(number)
        self._ended = time.perf_counter()
        self._last_cost = cost = self._ended - began
        self._restlessness.add(number, seconds)
        self.samples.append(
            SpeedSample(number=number, time=began, seconds=seconds, cost=cost, others=max(wall / seconds, 1.0))
        )
        return self.samples[-1]

    def _run(self, number: int) -> tuple[float, float]:
        """Seconds of this thread alone, where that is known, and by the wall clock."""
        batch, token_ids = self._batches[number]
        self._runner.assume_cached(batch.decode)
        began, cpu_began = time.perf_counter(), time.thread_time()
        self._runner.forward(batch, token_ids)
        wall, cpu = time.perf_counter() - began, time.thread_time() - cpu_began
        for request_id in token_ids:
            self._runner.free(request_id)
        return (cpu if self._on_cpu_clock else wall), wall

    def _batch(self, one: ReferencePass) -> tuple[Batch, dict[str, list[int]]]:
        decodes, encodes = one.kind == "decode", self._runner.spec.is_encoder_decoder
        rows = tuple(
            timed_sequence(f"{i}", one.num_tokens, decodes=decodes, encodes=encodes) for i in range(one.num_seqs)
        )
        tokens = {row.request_id: [i % self._runner.spec.vocab_size for i in range(row.num_tokens)] for row in rows}
        return (Batch(decode=rows) if decodes else Batch(prefill=rows)), tokens


def with_own_weights(
    spec: ModelSpec, passes: Sequence[ReferencePass], *, dtype: str, kv_dtype: str | None
) -> ReferencePasses:
    """Of random weights in memory of their own: as many layers as the passes run through, and the vocabulary."""
    layers = passes[0].num_layers
    few = replace(spec, num_layers=layers, num_encoder_layers=min(layers, spec.num_encoder_layers))
    return ReferencePasses(ModelRunner(few, dtype=dtype, kv_dtype=kv_dtype, num_blocks=1, dummy_weights=True), passes)


def timed_sequence(request_id: str, num_tokens: int, *, decodes: bool, encodes: bool) -> SequenceState:
    """A sequence with that many tokens in the cache, or to prefill; `encodes` is True for an encoder-decoder model.

    Of such a model's cached tokens half are the decoder's; none of its prompt is its start token.
    """
    outputs = num_tokens // 2 if decodes and encodes else 0
    begin = 1 if decodes or encodes else 0
    row = SequenceState(
        request_id=request_id,
        num_prompt_tokens=num_tokens - outputs + begin,
        num_output_tokens=outputs,
        max_output_tokens=outputs + 1,
    )
    row.num_blocks = num_blocks_for(row.num_tokens)
    return row


def _blocks(one: ReferencePass) -> int:
    return one.num_seqs * (num_blocks_for(one.num_tokens + 1) + 1)


def _first_layers(runner: ModelRunner, model: Model, num_layers: int, *, num_blocks: int) -> ModelRunner:
    """A runner with the same weights, of the first layers of each kind, and a KV cache of its own."""
    view, part = copy.copy(runner), copy.copy(model)
    part.layers = model.layers[:num_layers]
    encoder_layers = getattr(model, "encoder_layers", None)
    if encoder_layers is not None:
        part.encoder_layers = encoder_layers[:num_layers]  # type: ignore[attr-defined] # of an encoder-decoder model
    spec = runner.spec
    view.spec = replace(spec, num_layers=num_layers, num_encoder_layers=min(num_layers, spec.num_encoder_layers))
    view.model, view.shard, view.graphs = part, whole(view.spec), None
    with torch.inference_mode():
        cache = KVCache(
            view.spec,
            num_blocks,
            runner.cache.both_tables(0).dtype,
            runner.device,
            shard=view.shard,
            kernels=runner.kernels,
        )
        for layer in range(num_layers):
            for table_RD in cache.table(layer):
                table_RD.fill_(0.01)  # Unwritten pages would all be one cached page of zeros.
    view.use_cache(cache)
    return view
