"""Decode iterations timed as a GPU's engine runs them: captured graphs, whose parts are differences between captures.

Four captures over the same rows: the whole iteration, without the attention, without the layers, and the embedding
alone. A part is the difference of two, so parts add up to the replayed whole, launch gaps included; events inside a
capture would slow it. Replays run back to back as in the engine, over enough layers that weights, keys and values are
not cached.

On a CPU the captures are the stand-ins of `runner/compute/passes/graph_capture.py`. Not here: prefills, which are not
captured and are timed by `probe.py`.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from exeplan.core.batch import Batch, num_blocks_for
from exeplan.profiler.measuring.device import synchronize
from exeplan.runner.compute.blocks.layers import AttentionShape, Layer, Model
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.passes.decode_graphs import DecodeGraphs
from exeplan.runner.compute.passes.graph_capture import GraphCapturer
from exeplan.runner.engine.async_executor import AsyncExecutor
from exeplan.runner.engine.engine import Engine

_ROUNDS, _TIMED_SECONDS, _MOST_REPLAYS = 5, 0.02, 50
_LEAST_SECONDS = 1e-7
"""Seconds of a part that is below the noise of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeParts:
    """Seconds of one decode iteration: embedding, one layer, the attention in it, and the head."""

    embed: float
    layer: float
    attention: float
    head: float
    """Output head and greedy sampling."""


def decode_parts(
    runner: ModelRunner, model: Model, batch: Batch, token_ids: Mapping[str, Sequence[int]], *, num_layers: int
) -> DecodeParts:
    """Times a batch of rows that decode, over the first `num_layers` layers of the model."""
    layers = model.layers[:num_layers]

    def seconds(kept: Sequence[Layer]) -> float:
        graphs = recorded(runner, _with_layers(model, kept), (len(batch.decode),))
        graphs.replay(*runner.decode_inputs(batch, token_ids), None)
        return replay_seconds(graphs.captured[len(batch.decode)].replay, runner.device)

    whole, bare, around = seconds(layers), seconds([_without_attention(layer) for layer in layers]), seconds(())
    embed = min(_embed_seconds(runner, model, batch), around)
    return DecodeParts(
        embed=max(embed, _LEAST_SECONDS),
        layer=max((whole - around) / num_layers, _LEAST_SECONDS),
        attention=max((whole - bare) / num_layers, _LEAST_SECONDS),
        head=max(around - embed, _LEAST_SECONDS),
    )


def recorded(runner: ModelRunner, model: Model, sizes: tuple[int, ...]) -> DecodeGraphs:
    """Captured decode iterations of a model that replaces the runner's, for these batch sizes in rising order."""
    assert runner.kernels is not None
    encodes = runner.spec.is_encoder_decoder
    longest = runner.spec.max_context * (2 if encodes else 1)
    graphs = DecodeGraphs(
        model,
        runner.cache,
        runner.kernels,
        runner.shard,
        vocab_size=runner.spec.vocab_size,
        hidden_size=runner.spec.hidden_size,
        dtype=runner.activation,
        max_num_seqs=sizes[-1],
        max_num_blocks=min(num_blocks_for(longest), runner.cache.num_blocks),
        encodes=encodes,
        prev_token_B=torch.zeros(sizes[-1], dtype=torch.int64, device=runner.device),
    )
    graphs.sizes = sizes
    graphs.capture()
    return graphs


def _embed_seconds(runner: ModelRunner, model: Model, batch: Batch) -> float:
    rows = len(batch.decode)
    token_B = torch.zeros(rows, dtype=torch.int64, device=runner.device)
    position_B = torch.arange(rows, device=runner.device)

    def embed() -> tuple[Tensor, ...]:
        hidden_BE = model.embed(token_B, position_B)
        model.angles(position_B, position_B + 1)
        return (hidden_BE,)

    return replay_seconds(GraphCapturer(runner.device).capture(embed).replay, runner.device)


class _Stand:
    """A model with some layers replaced."""

    def __init__(self, model: Model, layers: Sequence[Layer]) -> None:
        self._model, self.layers = model, list(layers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _with_layers(model: Model, layers: Sequence[Layer]) -> Model:
    return cast(Model, _Stand(model, layers))


def _without_attention(layer: Layer) -> Layer:
    def queries(shape: AttentionShape, qkv_NMD: Tensor) -> Tensor:
        return qkv_NMD[:, : shape.num_heads].flatten(1)

    return lambda hidden_NE, angles, attend: layer(hidden_NE, angles, queries)


def replay_seconds(replay: Callable[[], object], place: torch.device) -> float:
    """Median over rounds of the mean of replays that follow one another."""
    started = time.perf_counter()
    replay()
    synchronize(place)
    once = max(time.perf_counter() - started, 1e-6)
    repeats = max(1, min(_MOST_REPLAYS, round(_TIMED_SECONDS / _ROUNDS / once)))
    return statistics.median(_mean_seconds(replay, repeats, place) for _ in range(_ROUNDS))


def _mean_seconds(replay: Callable[[], object], repeats: int, place: torch.device) -> float:
    if place.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            replay()
        return (time.perf_counter() - start) / repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call] # untyped
    begin.record()
    for _ in range(repeats):
        replay()
    end.record()
    synchronize(place)
    return begin.elapsed_time(end) * 1e-3 / repeats


def overheads(engine: Engine, runner: ModelRunner, *, num_steps: int) -> tuple[float, float]:
    """Seconds of a prefill, and of each decode iteration, beyond the device's passes.

    All requests of the engine fit one prefill. On a CPU a step computes what it launches within the step.
    """
    passes, walls = TimedPasses(runner.device), list[float]()
    with passes.of(runner):
        while engine.has_work and len(walls) <= num_steps:
            start = time.perf_counter()
            engine.step()
            walls.append(time.perf_counter() - start)
    device, decodes = passes.seconds(), max(len(walls) - 1, 1)
    first = device[0] if runner.device.type == "cuda" else sum(device[:2])
    later = (sum(walls[1:]) - sum(device[-decodes:])) / decodes
    return max(walls[0] - first, _LEAST_SECONDS), max(later, _LEAST_SECONDS)


class TimedPasses:
    """Device seconds of each pass of a runner while an engine drives it."""

    def __init__(self, place: torch.device) -> None:
        self.place = place
        self._marks: list[tuple[Any, Any]] = []

    @contextmanager
    def of(self, runner: ModelRunner) -> Iterator[None]:
        """Times the runner's passes within the context."""
        forward = runner.forward

        def timed(*arguments: Any, **named: Any) -> Tensor:
            start = self._mark()
            logits_RV = forward(*arguments, **named)
            self._marks.append((start, self._mark()))
            return logits_RV

        runner.forward = timed  # type: ignore[method-assign] # a seam that the engine must not know
        try:
            yield
        finally:
            del runner.forward  # The class's again: a bound method in its place would hold the runner in a circle.

    def seconds(self) -> list[float]:
        """Seconds of each pass so far."""
        synchronize(self.place)
        if self.place.type != "cuda":
            return [end - start for start, end in self._marks]
        return [start.elapsed_time(end) * 1e-3 for start, end in self._marks]

    def _mark(self) -> Any:
        if self.place.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch has no types here
        event.record()
        return event


@contextmanager
def captured_executor(runner: ModelRunner, model: Model, sizes: tuple[int, ...]) -> Iterator[AsyncExecutor]:
    """The executor of a GPU over a runner, with decode graphs captured for these sizes within the context."""
    before, runner.model = runner.model, model
    runner.graphs = recorded(runner, model, sizes)
    try:
        yield AsyncExecutor(runner)
    finally:
        runner.model, runner.graphs = before, None
