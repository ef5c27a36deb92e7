"""Rig: runs the real model runner and scheduler at one point and takes the times of their parts.

A visit is a few passes at one point; its value for each part is their median. On a CPU with one thread the clock is
the thread's CPU clock, which other processes do not stop, and a visit is short: a machine that other programs share is
fast or slow for a tenth of a second at a time, so that two passes tell as much of it as five, and the time is better
spent on another visit.

Not here: which points, how often (`campaign.py`), and the use of the values (`samples.py`).
"""

import itertools
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from exeplan.core.batch import BLOCK_SIZE, Batch, num_blocks_for
from exeplan.core.models.model import ModelSpec
from exeplan.core.profile import Device
from exeplan.core.schedule import Schedule
from exeplan.kernels.select import REFERENCE
from exeplan.policies import load_policy
from exeplan.profiler.measuring.captured_decode import captured_executor, decode_parts, overheads
from exeplan.profiler.measuring.device import synchronize
from exeplan.profiler.measuring.points import Point, Work, powers, ragged
from exeplan.profiler.measuring.probe import PassTimes, Probe
from exeplan.profiler.measuring.samples import Key
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.reference_passes import timed_sequence
from exeplan.runner.compute.tokens.sampling import GREEDY, SampledToken, SamplingInput, SamplingParams, sample
from exeplan.runner.compute.tokens.structures import Masks
from exeplan.runner.compute.warm_up import tune_kernels
from exeplan.runner.compute.weights.shard import ALONE, Group, whole
from exeplan.runner.engine import executor as execution
from exeplan.runner.engine.engine import Engine, Request
from exeplan.runner.engine.executor import InProcessExecutor
from exeplan.runner.engine.tokenizer import Tokenizer

_WARM_PASSES, _PASSES = 4, 5
_WARM_PASSES_ALONE, _PASSES_ALONE = 2, 2
"""On a CPU with one thread."""
_WARM_SECONDS, _TIMED_SECONDS = 0.06, 0.1
_LONG_PASS_SECONDS = 0.15
_ENGINE_STEPS = 8
_PROMPTS = 16
"""Different random prompts; more sequences share them."""

T = TypeVar("T")


def passes_of_visit(device: Device) -> int:
    """Passes that a visit consists of at most, those that warm up included."""
    alone = device.kind == "cpu" and device.num_threads == 1
    return _WARM_PASSES_ALONE + _PASSES_ALONE if alone else _WARM_PASSES + _PASSES


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What one visit found, in seconds."""

    values: dict[Key, float]
    seconds: float
    """Seconds of the whole visit."""


@dataclass(frozen=True, slots=True)
class _GreedyRow:
    """A row sampled greedily."""

    sampling: SamplingParams = GREEDY
    plain: bool = True
    seed: int = 0
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    banned_token_ids: Sequence[int] = ()


class Rig:
    """A model of `copies` layers, or one rank's shard of them, with random keys and values in its cache."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: str,
        kv_dtype: str | None = None,
        device: str,
        copies: int,
        num_blocks: int,
        dummy_weights: bool,
        group: Group = ALONE,
        whole_experts: bool = False,
        captured: bool | None = None,
    ) -> None:
        """`whole_experts`: the shard has some of a mixture's experts whole (see `Shard`). `captured` times decode
        iterations as captured graphs; the default on a GPU whose engine captures them."""
        self.spec, self.copies = spec, copies
        copied = replace(spec, num_layers=copies, num_encoder_layers=min(copies, spec.num_encoder_layers))
        self.runner = ModelRunner(
            copied,
            shard=replace(whole(copied), group=group, whole_experts=whole_experts),
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=device,
            num_blocks=num_blocks,
            dummy_weights=dummy_weights,
            paged_with=REFERENCE if captured and device == "cpu" else None,
        )
        self.place = self.runner.device
        self.captured = self.place.type == "cuda" and self.runner.can_capture if captured is None else captured
        if self.place.type == "cuda":
            tune_kernels(self.runner)
        self.alone = self.place.type == "cpu" and torch.get_num_threads() == 1
        """Whether all work is of this thread, so that its CPU clock tells how long it took."""
        self.probe = Probe(self.runner.model, self.place, alone=self.alone)
        self.runner.model = self.probe
        draw = random.Random(0)
        self.longest = spec.max_context
        self._prompts = [[draw.randrange(spec.vocab_size) for _ in range(self.longest)] for _ in range(_PROMPTS)]
        self._tokenizer = Tokenizer.load(spec)
        self._long: set[Point] = set()
        self._written = [0] * copies

    def visit(self, point: Point, work: Work) -> Visit:
        """Measures a point."""
        started = time.perf_counter()
        layers = self.copies if point.kind == "engine" else work.layers_needed(point, self.copies)
        self.probe.use_layers(layers)
        self._write(layers, point)
        found = self._measure(point)(point)
        values = {key: statistics.median(seconds) for key, seconds in found.items()}
        return Visit(values=values, seconds=time.perf_counter() - started)

    def _measure(self, point: Point) -> Callable[[Point], dict[Key, list[float]]]:
        if point.kind == "engine":
            return self._engine_ahead if self.captured else self._engine
        return self._replays if self.captured and point.kind == "decode" else self._passes

    @torch.inference_mode()
    def _write(self, layers: int, point: Point) -> None:
        """Writes the slots of a decode: unwritten pages would all be one cached page of zeros."""
        cache = self.runner.cache
        slots = min(cache.num_slots, point.num_seqs * BLOCK_SIZE * (num_blocks_for(point.tokens + 1) + 1))
        for layer in range(layers if point.kind == "decode" else 0):
            for table_RD in cache.table(layer):
                table_RD.view(cache.num_kv_heads, cache.num_slots, -1)[:, self._written[layer] : slots] = 0.01
            self._written[layer] = max(slots, self._written[layer])

    def batch(self, point: Point) -> tuple[Batch, dict[str, list[int]]]:
        """The sequences of a prefill or decode point, and their tokens."""
        one = 1 if point.kind == "decode" else 0
        lengths = ragged(point.num_seqs, point.tokens, self.longest - one)
        kinds = {"decodes": bool(one), "encodes": self.spec.is_encoder_decoder}
        rows = tuple(timed_sequence(f"{index}", length, **kinds) for index, length in enumerate(lengths))
        return (Batch(decode=rows) if point.kind == "decode" else Batch(prefill=rows)), self._tokens(len(rows), 0)

    def _tokens(self, num_seqs: int, shift: int) -> dict[str, list[int]]:
        return {f"{index}": self._prompts[(index + shift) % _PROMPTS] for index in range(num_seqs)}

    @contextmanager
    def placed(self, point: Point) -> Iterator[Callable[[], Tensor]]:
        """A function that runs one pass at a point; its KV blocks are freed in the end.

        Of a mixture of experts each pass has other tokens, which go to other experts.
        """
        batch, token_ids = self.batch(point)
        self.runner.assume_cached(batch.decode)
        tokens = [self._tokens(len(token_ids), shift) for shift in range(_PROMPTS if self.spec.experts else 1)]
        passes = itertools.cycle(tokens)
        try:
            yield lambda: self.runner.forward(batch, next(passes))
        finally:
            for request_id in token_ids:
                self.runner.free(request_id)

    def _passes(self, point: Point) -> dict[Key, list[float]]:
        found: dict[Key, list[float]] = defaultdict(list)
        with self.placed(point) as forward:
            self._warm(point, forward)
            started = time.perf_counter()
            for _ in range(1 if point in self._long else _PASSES_ALONE if self.alone else _PASSES):
                logits_RV, _ = self._timed(forward)
                times, sampling = self.probe.times(), self._sampling_seconds(logits_RV)
                for key, seconds in self._parts(point, times, sampling).items():
                    found[key].append(seconds)
                if time.perf_counter() - started > _TIMED_SECONDS:
                    break
        return found

    def _warm(self, point: Point, forward: Callable[[], Tensor]) -> None:
        """Fills the caches: a pass of a small model after something else is up to a fifth slower, the second one
        up to 6 %.

        The first pass ever also lets libraries prepare for its shape. Of a long pass nothing is left in a cache.
        """
        started = time.perf_counter()
        for _ in range(0 if point in self._long else _WARM_PASSES_ALONE if self.alone else _WARM_PASSES):
            _, seconds = self._timed(forward)
            if seconds > _LONG_PASS_SECONDS:
                self._long.add(point)
            if time.perf_counter() - started > _WARM_SECONDS:
                break

    def _parts(self, point: Point, times: PassTimes, sampling: float) -> dict[Key, float]:
        """The parts of one pass, by the measurement that they belong to."""
        seqs, tokens = point.num_seqs, point.total_tokens
        apart = self.spec.is_encoder_decoder or self.captured
        if point.kind == "decode":
            layer, attention = times.layer(self.spec.num_layers), times.attention(self.spec.num_layers)
            # Otherwise the rest of a layer is that of a prefill of as many tokens.
            rest: dict[Key, float] = {("rest", "decode", 0, seqs, 0): layer - attention} if apart else {}
            return {
                ("layer", "decode", seqs, 0, tokens): layer,
                ("attention", "decode", seqs, 0, tokens): attention,
                ("embed", "", 0, seqs, 0): times.embed,
                ("head", "", seqs, 0, 0): times.head + sampling,
                **rest,
            }
        layer, attention = self._prefill_layer(times)
        return {
            ("layer", "prefill", seqs, tokens, 0): layer,
            ("attention", "prefill", seqs, tokens, 0): attention,
            ("rest", "prefill" if apart else "", 0, tokens, 0): layer - attention,
            ("embed", "", 0, tokens, 0): times.embed,
        }

    def _prefill_layer(self, times: PassTimes) -> tuple[float, float]:
        """A layer and its attention; an encoder layer with its share of what its output costs the decoder layers."""
        layers, encoder_layers = self.spec.num_layers, self.spec.num_encoder_layers
        if not encoder_layers:
            return times.layer(layers), times.attention(layers)
        cross = times.cross / len(self.probe.layers) * layers / encoder_layers
        return times.encoder_layer(encoder_layers) + cross, times.encoder_attention(encoder_layers)

    def _engine(self, point: Point) -> dict[Key, list[float]]:
        """Seconds of whole iterations beyond the model and the sampling in them."""
        with self.engine(Schedule("orca", {"max_num_seqs": point.num_seqs})) as engine:
            return self._iterations(engine, point)

    def _iterations(self, engine: Engine, point: Point) -> dict[Key, list[float]]:
        for index in range(point.num_seqs):
            prompt = self._prompts[index % _PROMPTS][: point.tokens]
            engine.add(self.request(f"{index}", prompt, min(_ENGINE_STEPS + 2, self.longest - point.tokens)))
        found: dict[Key, list[float]] = defaultdict(list)
        prefill: Key = ("overhead", "prefill", point.num_seqs, point.total_tokens, 0)
        decode: Key = ("overhead", "decode", point.num_seqs, 0, 0)
        for key in (prefill, *[decode] * _ENGINE_STEPS):
            if not engine.has_work:
                break
            with self._timed_sampling() as sampling:
                _, seconds = self._timed(engine.step)
            found[key].append(max(seconds - self.probe.times().total - sum(sampling), 1e-7))
        for index in range(point.num_seqs):
            engine.abort(f"{index}")
        return found

    def _replays(self, point: Point) -> dict[Key, list[float]]:
        """The parts of a captured decode iteration."""
        batch, token_ids = self.batch(point)
        self.runner.assume_cached(batch.decode)
        layers = len(self.probe.layers)
        try:
            parts = decode_parts(self.runner, self.probe.model, batch, token_ids, num_layers=layers)
        finally:
            for request_id in token_ids:
                self.runner.free(request_id)
        seqs, tokens = point.num_seqs, point.total_tokens
        return {
            ("layer", "decode", seqs, 0, tokens): [parts.layer],
            ("attention", "decode", seqs, 0, tokens): [parts.attention],
            ("rest", "decode", 0, seqs, 0): [max(parts.layer - parts.attention, 1e-7)],
            ("embed", "", 0, seqs, 0): [parts.embed],
            ("head", "", seqs, 0, 0): [parts.head],
        }

    def _engine_ahead(self, point: Point) -> dict[Key, list[float]]:
        """The same with asynchronous scheduling."""
        with self.engine(Schedule("orca", {"max_num_seqs": point.num_seqs})) as engine:
            for index in range(point.num_seqs):
                prompt = self._prompts[index % _PROMPTS][: point.tokens]
                engine.add(self.request(f"{index}", prompt, min(_ENGINE_STEPS + 2, self.longest - point.tokens)))
            prefill, decode = overheads(engine, self.runner, num_steps=_ENGINE_STEPS)
            for index in range(point.num_seqs):
                engine.abort(f"{index}")
        return {
            ("overhead", "prefill", point.num_seqs, point.total_tokens, 0): [prefill],
            ("overhead", "decode", point.num_seqs, 0, 0): [decode],
        }

    @contextmanager
    def engine(self, schedule: Schedule) -> Iterator[Engine]:
        """A whole engine over this rig's model, with the executor that its device has."""
        blocks = self.runner.cache.num_blocks
        if not self.captured:
            yield Engine(InProcessExecutor(self.runner), schedule, tokenizer=self._tokenizer, num_blocks=blocks)
            return
        slots = load_policy(schedule.policy).pass_limits(schedule).decode_rows
        assert slots is not None
        with captured_executor(self.runner, self.probe.model, tuple(sorted({*powers(1, slots, 2), slots}))) as executor:
            yield Engine(executor, schedule, tokenizer=self._tokenizer, num_blocks=blocks)

    def request(self, request_id: str, prompt: list[int], max_tokens: int) -> Request:
        """A greedy request that runs to its full length."""
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return Request(request_id=request_id, prompt_token_ids=prompt, sampling=sampling)

    def _sampling_seconds(self, logits_RV: Tensor) -> float:
        """How long it takes to sample greedily from fresh logits."""
        start = self.now()
        sample(logits_RV, [_GreedyRow()] * len(logits_RV))
        return (self.now() - start) * 1e-9

    @contextmanager
    def _timed_sampling(self) -> Iterator[list[float]]:
        """Seconds that the engine spends in sampling, an entry a call; they belong to the head."""
        seconds: list[float] = []

        def timed(logits_RV: Tensor, rows: Sequence[SamplingInput], masks: Masks) -> list[SampledToken | None]:
            start = self.now()
            tokens = sample(logits_RV, rows, masks)
            seconds.append((self.now() - start) * 1e-9)
            return tokens

        setattr(execution, "sample", timed)  # noqa: B010 - it is imported there, not exported
        try:
            yield seconds
        finally:
            setattr(execution, "sample", sample)  # noqa: B010 - as above

    def _timed(self, work: Callable[[], T]) -> tuple[T, float]:
        """The result, and the seconds it took."""
        began = self.now()
        result = work()
        synchronize(self.place)
        return result, (self.now() - began) * 1e-9

    def now(self) -> int:
        """Nanoseconds on the clock that the parts are timed by; on a GPU on the wall clock."""
        return time.thread_time_ns() if self.alone else time.perf_counter_ns()
