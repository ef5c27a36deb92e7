"""Probe: wraps a model and timestamps the boundaries of its parts while the engine runs it.

A pass visits every layer's own weights and its own keys and values once, as in the real engine: caches are as cold, or
as hot, as there. Unlike there the last layer computes every token, as it stands for all layers. The probe stands in for
a runner's model; neither runner nor engine knows about it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, cast

import torch
from torch import Tensor

from exeplan.profiler.measuring.device import synchronize
from exeplan.runner.compute.blocks.encoder import EncoderDecoderModel
from exeplan.runner.compute.blocks.layers import Attend, AttentionShape, Layer, Model
from exeplan.runner.compute.blocks.rotary import Angles

Clock = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """Seconds of one pass; `layers` and `attentions` hold one entry for each layer that was visited.

    An encoder-decoder model's decoder layers have two attentions each, which count together.
    """

    embed: float
    layers: tuple[float, ...]
    attentions: tuple[float, ...]
    head: float
    encoder_layers: tuple[float, ...] = ()
    encoder_attentions: tuple[float, ...] = ()
    cross: float = 0.0
    """Of the keys and values of prompts in the cross attentions of as many decoder layers as may be visited."""

    @property
    def total(self) -> float:
        """The whole model as it ran, without what the engine does around it."""
        return self.embed + sum(self.encoder_layers) + self.cross + sum(self.layers) + self.head

    def layer(self, num_layers: int) -> float:
        """A layer's share of `num_layers` of them, of which only some were visited."""
        return _share(self.layers, num_layers)

    def attention(self, num_layers: int) -> float:
        """The same of its attention."""
        return _share(self.attentions, num_layers)

    def encoder_layer(self, num_layers: int) -> float:
        """An encoder layer's share of `num_layers` of them."""
        return _share(self.encoder_layers, num_layers)

    def encoder_attention(self, num_layers: int) -> float:
        """The same of its attention."""
        return _share(self.encoder_attentions, num_layers)


def _share(seconds: tuple[float, ...], num_layers: int) -> float:
    """Mean over all layers: the first works out what all use, and the others stand for those not visited."""
    if len(seconds) == 1:
        return seconds[0]
    first, others = seconds[0], sum(seconds[1:]) / (len(seconds) - 1)
    return (first + (num_layers - 1) * others) / num_layers


class Probe:
    """Wraps a model; after each pass `times()` tells how long its parts took.

    On a CPU the clock is the wall clock, or, with `alone`, the thread's CPU clock, which other processes do not stop.
    On CUDA it is events in the stream.
    """

    def __init__(self, model: Model, place: torch.device, *, alone: bool = False) -> None:
        self.model, self.place = model, place
        on_cpu: Clock = time.thread_time_ns if alone else time.perf_counter_ns
        self.clock: Clock = _event if place.type == "cuda" else on_cpu
        self._around: dict[str, list[Any]] = {}
        """Marks of what is not in the layers, beginnings and ends in turn."""
        self._decoder_marks: list[list[Any]] = []
        """For each layer its beginning, those and the ends of its attentions, and its end."""
        self._encoder_marks: list[list[Any]] = []
        self._every_layer = [_timed(layer, self._decoder_marks, self.clock) for layer in model.layers]
        encoder_layers = getattr(model, "encoder_layers", ())
        self._every_encoder_layer = [_timed(layer, self._encoder_marks, self.clock) for layer in encoder_layers]
        self.layers, self.encoder_layers = self._every_layer, self._every_encoder_layer

    def use_layers(self, count: int) -> None:
        """The next passes visit only the first `count` layers of each kind."""
        self.layers, self.encoder_layers = self._every_layer[:count], self._every_encoder_layer[:count]

    def embed(self, token_N: Tensor, position_N: Tensor) -> Tensor:
        self._around = {"embed": [], "cross": [], "head": []}
        self._decoder_marks.clear()
        self._encoder_marks.clear()
        self._mark("embed")
        hidden_NE = self.model.embed(token_N, position_N)
        self._mark("embed")
        return hidden_NE

    def angles(self, position_N: Tensor, length_N: Tensor) -> Angles | None:
        self._mark("embed")
        angles = self.model.angles(position_N, length_N)
        self._mark("embed")
        return angles

    def encoded(self, hidden_NE: Tensor) -> Tensor:
        return cast(EncoderDecoderModel, self.model).encoded(hidden_NE)

    def cross_keys_values(self, encoded_NE: Tensor) -> Iterator[Tensor]:
        """Of the layers in use; the time ends when the last of them are stored."""
        self._mark("cross")
        found = cast(EncoderDecoderModel, self.model).cross_keys_values(encoded_NE)
        yield from islice(found, len(self.layers))
        self._mark("cross")

    def head(self, hidden_RE: Tensor) -> Tensor:
        self._mark("head")
        logits_RV = self.model.head(hidden_RE)
        self._mark("head")
        return logits_RV

    def _mark(self, part: str) -> None:
        self._around[part].append(self.clock())

    def times(self) -> PassTimes:
        """Of the last pass."""
        synchronize(self.place)
        around = {part: sum(_spans(marks)[::2]) for part, marks in self._around.items()}
        return PassTimes(
            embed=around["embed"],
            layers=tuple(_seconds(marks[0], marks[-1]) for marks in self._decoder_marks),
            attentions=tuple(sum(_spans(marks)[1::2]) for marks in self._decoder_marks),
            head=around["head"],
            encoder_layers=tuple(_seconds(marks[0], marks[-1]) for marks in self._encoder_marks),
            encoder_attentions=tuple(sum(_spans(marks)[1::2]) for marks in self._encoder_marks),
            cross=around["cross"],
        )


def _timed(layer: Layer, all_marks: list[list[Any]], clock: Clock) -> Layer:
    """The layer, which appends its marks; it holds no probe, which would hold the weights in a circle."""

    def run(hidden_NE: Tensor, angles: Angles | None, attend: Attend, wanted_R: Tensor | None = None) -> Tensor:
        marks: list[Any] = []

        def timed_attend(shape: AttentionShape, qkv_NMD: Tensor) -> Tensor:
            marks.append(clock())
            out = attend(shape, qkv_NMD)
            marks.append(clock())
            return out

        marks.append(clock())
        hidden_NE = layer(hidden_NE, angles, timed_attend)
        marks.append(clock())
        all_marks.append(marks)
        return hidden_NE if wanted_R is None else hidden_NE[wanted_R]

    return run


def _spans(marks: Sequence[Any]) -> list[float]:
    return [_seconds(start, end) for start, end in pairwise(marks)]


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch has no types here
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    return (end - start) * 1e-9 if isinstance(start, int) else start.elapsed_time(end) * 1e-3
