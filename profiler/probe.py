"""Probe: a model that notes the time at its seams while the engine runs it, so that each part is timed where it runs.

A pass visits every layer's own weights and its own keys and values once, as in the real engine: caches are as cold, or
as hot, as there. The probe stands in for a runner's model; neither runner nor engine knows about it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exeplan.profiler.device import synchronize
from exeplan.runner.layers import Attend, AttentionShape, Layer, Model
from exeplan.runner.rotary import Angles

Clock = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """Seconds of one pass; `layers` and `attentions` hold one entry for each layer that was visited."""

    embed: float
    layers: tuple[float, ...]
    attentions: tuple[float, ...]
    head: float

    @property
    def total(self) -> float:
        """The whole model as it ran, without what the engine does around it."""
        return self.embed + sum(self.layers) + self.head

    def layer(self, num_layers: int) -> float:
        """A layer's share of `num_layers` of them, of which only some were visited."""
        return _share(self.layers, num_layers)

    def attention(self, num_layers: int) -> float:
        """The same of its attention."""
        return _share(self.attentions, num_layers)


def _share(seconds: tuple[float, ...], num_layers: int) -> float:
    """Mean over all layers: the first works out what all use, and the others stand for those not visited."""
    if len(seconds) == 1:
        return seconds[0]
    first, others = seconds[0], sum(seconds[1:]) / (len(seconds) - 1)
    return (first + (num_layers - 1) * others) / num_layers


class Probe:
    """Wraps a model; after each pass `times()` tells how long its parts took.

    On a CPU the clock is the wall clock, or the thread's CPU clock inside `cpu_clock`, which a busy machine does not
    disturb; on CUDA it is events in the stream.
    """

    def __init__(self, model: Model, place: torch.device) -> None:
        self.model, self.place = model, place
        self.clock: Clock = _event if place.type == "cuda" else time.perf_counter_ns
        self._marks: list[Any] = []
        self._every_layer: list[Layer] = [self._timed(layer) for layer in model.layers]
        self.layers = self._every_layer

    def use_layers(self, count: int) -> None:
        """The next passes visit only the first `count` layers."""
        self.layers = self._every_layer[:count]

    def embed(self, token_N: Tensor, position_N: Tensor) -> Tensor:
        self._marks = [self.clock()]
        hidden_NE = self.model.embed(token_N, position_N)
        self._marks.append(self.clock())
        return hidden_NE

    def angles(self, position_N: Tensor, length_N: Tensor) -> Angles | None:
        self._marks.append(self.clock())
        angles = self.model.angles(position_N, length_N)
        self._marks.append(self.clock())
        return angles

    def head(self, hidden_RE: Tensor) -> Tensor:
        self._marks.append(self.clock())
        logits_RV = self.model.head(hidden_RE)
        self._marks.append(self.clock())
        return logits_RV

    def _timed(self, layer: Layer) -> Layer:
        def run(hidden_NE: Tensor, angles: Angles | None, attend: Attend) -> Tensor:
            def timed_attend(shape: AttentionShape, qkv_NMD: Tensor) -> Tensor:
                self._marks.append(self.clock())
                out = attend(shape, qkv_NMD)
                self._marks.append(self.clock())
                return out

            self._marks.append(self.clock())
            hidden_NE = layer(hidden_NE, angles, timed_attend)
            self._marks.append(self.clock())
            return hidden_NE

        return run

    def times(self) -> PassTimes:
        """Of the last pass."""
        synchronize(self.place)
        spans = [_seconds(start, end) for start, end in zip(self._marks, self._marks[1:], strict=False)]
        # embed, gap, angles, then per layer: gap, before attention, attention, after it; then gap, head.
        attentions = spans[5:-2:4]
        return PassTimes(
            embed=spans[0] + spans[2],
            layers=tuple(map(sum, zip(spans[4:-2:4], attentions, spans[6:-2:4], strict=True))),
            attentions=tuple(attentions),
            head=spans[-1],
        )


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    return (end - start) * 1e-9 if isinstance(start, int) else start.elapsed_time(end) * 1e-3
