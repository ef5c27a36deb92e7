"""Workload: how long requests are, as the joint histogram of input and output tokens, and what follows from it.

Nothing here assumes a shape: a truncated normal is one way to make a histogram (`exeplan.workload.laws`), a trace
another (`exeplan.workload.files`). The steady state of a schedule follows from `Workload.decode_law`. Not here: time.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from exeplan.arrays import Bools, Floats
from exeplan.errors import InputError
from exeplan.figures import axes_or_new
from exeplan.workload.deadlines import Deadlines
from exeplan.workload.length_law import DecodeLaw, Ints, LengthLaw, PaperLaw, added_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DENSE_CELLS, _CELLS_A_POINT = 1 << 22, 16
"""Up to this many cells, in all and a point, equal points are merged by counting, above it by sorting."""

_BOUNDED = 0.99
"""Quantile of the outputs from which on a sample has its share of the requests."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order of arrival, one array entry a request."""

    inputs: Ints
    outputs: Ints
    arrival_s: Floats | None = None
    """Seconds, never falling; None where the source has no times."""


@dataclass(frozen=True, eq=False, repr=False)
class Workload:
    """The joint histogram of input and output tokens. Make one with `Workload.of` or `load_workload`.

    Points are unique and sorted by (output, input); `inputs`, `outputs` and `weights` have one entry a point, and the
    weights sum to 1. Compare workloads by `fingerprint`.
    """

    name: str
    inputs: Ints
    outputs: Ints
    weights: Floats
    source: str = ""
    """Where the figures come from and what was done to them, for people."""
    trace: Trace | None = None
    """The requests themselves, where the workload is a trace."""
    deadlines: Deadlines | None = None
    """How long after its arrival a request's answer is of use; None for however late."""
    reference: str | None = None
    """What a plan names it by: a file, a shipped name or a law; None for one that was made in memory."""
    as_paper: bool = False
    """Steady states follow ExeGPT's formula instead of the exact one: to reproduce its figures."""

    def __repr__(self) -> str:
        lengths = (
            f"{side}: mean {law.mean:.4g}, p50 {law.quantile(0.5)}, p99 {law.quantile(0.99)}, max {law.max} tokens"
            for side, law in (("input", self.input_law), ("output", self.output_law))
        )
        return "\n  ".join([f"workload {self.name}", *lengths, *([self.source] if self.source else [])])

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draws the share of requests that are longer than each length, inputs and outputs, on these or new axes."""
        axes = axes_or_new(ax)
        for side, law in (("input", self.input_law), ("output", self.output_law)):
            longer = 1.0 - np.concatenate([[0.0], law.cdf])
            axes.step(np.concatenate([[0], law.tokens]), longer, where="post", label=f"{side}, mean {law.mean:.0f}")
        axes.set(xlabel="tokens", ylabel="share of requests that are longer", title=self.name, ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend()
        return axes

    @classmethod
    def of(
        cls, name: str, *, inputs: ArrayLike, outputs: ArrayLike, weights: ArrayLike, source: str = ""
    ) -> "Workload":
        """A workload from points in any order; equal points are added up and weights normalised."""
        points = _merged(np.asarray(inputs, np.int64), np.asarray(outputs, np.int64), np.asarray(weights, np.float64))
        return cls(name, *points, source=source)

    @classmethod
    def of_trace(cls, name: str, trace: Trace, *, source: str = "") -> "Workload":
        """The histogram of a trace, which stays at hand as `trace`."""
        weights = np.ones(len(trace.inputs))
        points = cls.of(name, inputs=trace.inputs, outputs=trace.outputs, weights=weights, source=source)
        return replace(points, trace=trace)

    @cached_property
    def input_law(self) -> LengthLaw:
        """The law of the input length alone."""
        return _marginal(self.inputs, self.weights)

    @cached_property
    def output_law(self) -> LengthLaw:
        """The law of the output length alone."""
        return _marginal(self.outputs, self.weights)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return int((self.inputs + self.outputs).max())

    @property
    def mean_input(self) -> float:
        return self.input_law.mean

    @property
    def mean_output(self) -> float:
        return self.output_law.mean

    @cached_property
    def total_std(self) -> float:
        """Standard deviation of input + output."""
        total = self.inputs + self.outputs
        return float(np.sqrt(np.square(total - self.weights @ total) @ self.weights))

    @property
    def max_input(self) -> int:
        return self.input_law.max

    @property
    def max_output(self) -> int:
        return self.output_law.max

    def input_quantile(self, q: float) -> int:
        """See `LengthLaw.quantile`."""
        return self.input_law.quantile(q)

    def output_quantile(self, q: float) -> int:
        """See `LengthLaw.quantile`."""
        return self.output_law.quantile(q)

    def decode_law(self, *, first_token_from_prefill: bool = True) -> DecodeLaw:
        """The law of the decode steps: S - 1 a request for a decoder-only model, S for an encoder-decoder one."""
        return self._prefill_yields_first if first_token_from_prefill else self._decode_yields_all

    @cached_property
    def _prefill_yields_first(self) -> DecodeLaw:
        return self._law.of(self.outputs - 1, self.inputs, self.weights)

    @cached_property
    def _decode_yields_all(self) -> DecodeLaw:
        return self._law.of(self.outputs, self.inputs, self.weights)

    @property
    def _law(self) -> type[DecodeLaw]:
        return PaperLaw if self.as_paper else DecodeLaw

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits over points and weights; weights count to 1e-9, so that rounding between machines does not."""
        digest = hashlib.sha256()
        for array in (self.inputs, self.outputs, np.rint(self.weights * 1e9).astype(np.int64)):
            digest.update(array.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def sample(self, n: int, seed: int, stratified: bool = True) -> tuple[Ints, Ints]:
        """Input and output tokens of `n` requests in random order; equal seeds give equal requests.

        Stratified: equidistant draws along a path that visits the points by bands of output and, inside a band, by
        input, so that both marginals of the sample follow the law much closer than independent draws do. Outputs of at
        least the 99th-percentile length, which bounds are on, are a band of their own.
        """
        rng = np.random.default_rng(seed)
        if stratified:
            path, draws = self._path(bands=round(n**0.5)), (np.arange(n) + rng.random()) / n
        else:
            path, draws = np.arange(len(self.weights)), rng.random(n)
        cdf = np.cumsum(self.weights[path])
        chosen = path[np.searchsorted(cdf, draws * cdf[-1], side="right").clip(max=len(cdf) - 1)]
        chosen = rng.permutation(chosen)
        return self.inputs[chosen], self.outputs[chosen]

    def _path(self, bands: int) -> Ints:
        band = ((np.cumsum(self.weights) - self.weights / 2) * bands).astype(np.int64)
        band += self.outputs >= self.output_quantile(_BOUNDED)
        back_and_forth = np.where(band % 2, -self.inputs, self.inputs)
        return np.lexsort((self.outputs, back_and_forth, band))

    def only(self, points: Bools) -> "Workload":
        """The lengths of requests at these points, at least one; the trace is left out."""
        weights = self.weights[points]
        return replace(
            self, inputs=self.inputs[points], outputs=self.outputs[points], weights=weights / weights.sum(), trace=None
        )

    def scale(self, output_factor: float) -> "Workload":
        """Outputs multiplied by a factor. Between two whole lengths a point is split so that the mean stays right.

        Only a factor below 1 can miss the mean: no output becomes shorter than 1 token. The trace is left out.
        """
        exact = np.maximum(self.outputs * output_factor, 1.0)
        low = np.floor(exact).astype(np.int64)
        up = exact - low
        scaled = Workload.of(
            self.name,
            inputs=np.concatenate([self.inputs, self.inputs]),
            outputs=np.concatenate([low, low + 1]),
            weights=np.concatenate([self.weights * (1 - up), self.weights * up]),
            source=f"{self.source}; outputs x{output_factor:.3g}".lstrip("; "),
        )
        return replace(scaled, deadlines=self.deadlines)

    def fit_context(self, max_context: int, *, scale: bool = True, like: "Workload | None" = None) -> "Workload":
        """The workload with input + output <= `max_context` for every request; itself where that holds already.

        `like` is one whose factors it takes, so that both stay comparable.

        Scaled, each side by its own factor: outputs so that their 99th percentile takes at most half the context (or
        what the inputs leave, if more), inputs so that theirs takes at most the rest. What is still too long (all of
        it, unscaled) is cut, the longer side first. `source` says what was done.
        """
        if max_context < 2:
            raise InputError(f"a context of {max_context} tokens cannot hold a prompt and an output; the least is 2")
        model = self if like is None else like
        if int((model.inputs + model.outputs).max()) <= max_context:
            scale = False
        if not scale and int((self.inputs + self.outputs).max()) <= max_context:
            return self
        factors = model._context_factors(max_context) if scale else (1.0, 1.0)
        inputs, outputs, cut = _fitted(self.inputs, self.outputs, factors, max_context)
        done = f"inputs x{factors[0]:.3g}, outputs x{factors[1]:.3g}, " if scale else ""
        source = f"{self.source}; {done}{cut @ self.weights:.2%} cut, to fit {max_context} tokens".lstrip("; ")
        if self.trace is None:
            return Workload.of(self.name, inputs=inputs, outputs=outputs, weights=self.weights, source=source)
        inputs, outputs, _ = _fitted(self.trace.inputs, self.trace.outputs, factors, max_context)
        return Workload.of_trace(self.name, replace(self.trace, inputs=inputs, outputs=outputs), source=source)

    def _context_factors(self, max_context: int) -> tuple[float, float]:
        long_input, long_output = self.input_quantile(0.99), self.output_quantile(0.99)
        output = min(1.0, max(max_context // 2, max_context - long_input) / long_output)
        return min(1.0, (max_context - output * long_output) / long_input), output


def _fitted(inputs: Ints, outputs: Ints, factors: tuple[float, float], context: int) -> tuple[Ints, Ints, Bools]:
    """Lengths scaled by (input, output) factors and cut to the context, and which of them were cut."""
    scaled = [np.maximum(np.rint(x * f), 1).astype(np.int64) for x, f in zip((inputs, outputs), factors, strict=True)]
    cut_outputs = np.minimum(scaled[1], np.maximum(context // 2, context - scaled[0]))
    cut_inputs = np.minimum(scaled[0], context - cut_outputs)
    return cut_inputs, cut_outputs, scaled[0] + scaled[1] > context


def _merged(inputs: Ints, outputs: Ints, weights: Floats) -> tuple[Ints, Ints, Floats]:
    width = int(inputs.max()) + 1
    keys = outputs * width + inputs
    if int(keys.max()) < min(_DENSE_CELLS, _CELLS_A_POINT * len(keys)):
        sums = added_up(keys, weights)
        keys = np.flatnonzero(sums)
        sums = sums[keys]
    else:
        keys, inverse = np.unique(keys, return_inverse=True)
        sums = added_up(inverse, weights)
        keys, sums = keys[sums > 0], sums[sums > 0]
    return keys % width, keys // width, sums / sums.sum()


def _marginal(tokens: Ints, weights: Floats) -> LengthLaw:
    values, inverse = np.unique(tokens, return_inverse=True)
    return LengthLaw(values, added_up(inverse, weights))
