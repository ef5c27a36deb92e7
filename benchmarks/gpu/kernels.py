"""Each kernel's achieved bandwidth or rate, as a share of the measured ceiling and against torch's counterpart.

Bytes and operations are those that a kernel's docstring counts. Inputs are random, shapes those of Llama-3.1-8B.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole field uses

from benchmarks.gpu.attention import against_flex, attention_cases
from benchmarks.gpu.setting import Case, Clock, Section, Setting, give_back, num_sets, seconds_of
from exeplan.kernels.products.fp8_linear import Fp8Linear
from exeplan.kernels.products.linear import Linear
from exeplan.kernels.select import REFERENCE

_EPS = 1e-5


def run(setting: Setting, clock: Clock) -> Section:
    header = ("kernel", "time us", "GB/s", "TFLOP/s", "of ceiling", "torch us", "torch / ours")
    section = Section(title="kernels", header=header)
    for case in _cases(setting):
        if clock.left < 0:
            section.notes.append(f"out of time before {case.name}")
            break
        try:
            _measure(case, setting, section)
        except Exception as error:
            section.failures.append(f"{case.name}: {type(error).__name__}: {error}")
        give_back(setting)
    return section


@torch.inference_mode()
def _measure(case: Case, setting: Setting, section: Section) -> None:
    sets = [case.make() for _ in range(num_sets(setting, case.num_bytes))]
    ours = seconds_of([lambda inputs=inputs: case.ours(*inputs) for inputs in sets], setting)
    theirs = None
    try:
        if case.theirs:
            theirs = seconds_of([lambda inputs=inputs: case.theirs(*inputs) for inputs in sets], setting)
    except Exception as error:
        section.notes.append(f"torch's own {case.name} does not run here: {type(error).__name__}: {error}"[:300])
    share, bound = setting.share(ours, num_bytes=case.num_bytes, flops=case.flops)
    cells = (
        case.name,
        f"{1e6 * ours:.1f}",
        f"{case.num_bytes / ours / 1e9:.0f}",
        f"{case.flops / ours / 1e12:.1f}" if case.flops else "-",
        f"{100 * share:.0f} % {bound}",
        f"{1e6 * theirs:.1f}" if theirs else "-",
        f"{theirs / ours:.2f}" if theirs else "-",
    )
    section.add(
        cells,
        kernel=case.name,
        seconds=ours,
        bytes=case.num_bytes,
        flops=case.flops,
        share=share,
        bound=bound,
        torch_seconds=theirs,
    )


def _cases(setting: Setting) -> Iterator[Case]:
    yield from attention_cases(setting)
    yield from _caches(setting)
    yield from _rows(setting)
    yield from _sampling(setting)
    yield from _products(setting)
    yield from against_flex(setting)


def _caches(setting: Setting) -> Iterator[Case]:
    spec, tokens, layers = setting.spec, setting.size(8192, 32), setting.size(8, 2)
    heads, slots = 2 * spec.num_kv_heads, 2 * tokens
    moved = 2 * tokens * heads * spec.head_dim * setting.torch_dtype.itemsize

    def table(layers: int = 1, dtype: torch.dtype | None = None) -> Any:
        return setting.random(layers, 2, spec.num_kv_heads * slots, spec.head_dim, dtype=dtype)

    def chosen() -> Any:
        return torch.randperm(slots, device=setting.place)[:tokens].int()

    def stored(dtype: torch.dtype | None = None) -> tuple[Any, ...]:
        return setting.random(tokens, heads, spec.head_dim), chosen(), table(dtype=dtype)[0]

    kernels = setting.kernels

    def by_index(kv, slots, tables):
        tables.view(heads, -1, spec.head_dim)[:, slots.long()] = kv.transpose(0, 1)

    yield Case(f"store of {tokens} tokens", stored, kernels.store_slots, by_index, moved)
    if not setting.smoke and setting.in_fp8:
        fewer = moved / 2 + moved / 2 / setting.torch_dtype.itemsize
        in_fp8 = partial(stored, torch.float8_e4m3fn)
        yield Case(f"store of {tokens} tokens in fp8", in_fp8, kernels.store_slots, None, fewer)

    def scattered() -> tuple[Any, ...]:
        return setting.random(layers, tokens, heads, spec.head_dim), chosen(), table(layers)

    def scatter_by_index(kv, slots, tables):
        tables.view(layers, heads, -1, spec.head_dim)[:, :, slots.long()] = kv.transpose(1, 2)

    name = f"scatter of {tokens} tokens, {layers} layers"
    yield Case(name, scattered, kernels.scatter_slots, scatter_by_index, layers * moved)


def _rows(setting: Setting) -> Iterator[Case]:
    spec, tokens, kernels = setting.spec, setting.size(8192, 16), setting.kernels
    size, width = setting.torch_dtype.itemsize, spec.hidden_size
    one = tokens * width * size

    def two() -> tuple[Any, ...]:
        return setting.random(tokens, width), setting.random(tokens, width)

    def single() -> tuple[Any, ...]:
        return two()[:1]

    weight = setting.random(width)
    for name, number in (("add_rms_norm", 4), ("add_layer_norm", 4)):
        more = (weight,) if name == "add_rms_norm" else (weight, weight)

        def both(kernels, name=name, more=more):
            return lambda x, residual: getattr(kernels, name)(x, residual, *more, _EPS)

        yield Case(f"{name}, {tokens} x {width}", two, both(kernels), both(REFERENCE), number * one)
    for name, more in (("rms_norm", (weight,)), ("layer_norm", (weight, weight))):

        def alone(kernels, name=name, more=more):
            return lambda x: getattr(kernels, name)(x, *more, _EPS)

        yield Case(f"{name}, {tokens} x {width}", single, alone(kernels), alone(REFERENCE), 2 * one)
    angle_N1D = torch.rand(tokens, 1, spec.head_dim, device=setting.place)
    angles = angle_N1D.cos().to(setting.torch_dtype), angle_N1D.sin().to(setting.torch_dtype)
    turned = spec.num_heads + spec.num_kv_heads

    def heads() -> tuple[Any, ...]:
        return setting.random(tokens, turned, spec.head_dim), *angles

    moved = 2 * tokens * (turned + 1) * spec.head_dim * size
    yield Case(f"rotary, {tokens} x {turned} heads", heads, kernels.rotate, REFERENCE.rotate, moved)
    inner = spec.intermediate_size

    def gate_up() -> tuple[Any, ...]:
        return (setting.random(tokens, 2 * inner),)

    def gated(x):
        return kernels.gated_activation(x, "silu")

    def torchs(x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    yield Case(f"SwiGLU, {tokens} x {inner}", gate_up, gated, torchs, 3 * tokens * inner * size)

    def gelu(kernels):
        return lambda x: kernels.plain_activation(x, "gelu")

    yield Case(f"GeLU, {tokens} x {2 * inner}", gate_up, gelu(kernels), gelu(REFERENCE), 4 * tokens * inner * size)
    if not setting.smoke and setting.in_fp8:
        name, quantize = f"rows in fp8, {tokens} x {width}", kernels.quantize_rows
        yield Case(name, single, quantize, REFERENCE.quantize_rows, (2 * size + 1) * tokens * width)


def _sampling(setting: Setting) -> Iterator[Case]:
    rows, vocab, kernels = setting.size(256, 3), setting.spec.vocab_size, setting.kernels
    moved = 4 * rows * vocab

    def logits() -> tuple[Any, ...]:
        return (4 * setting.random(rows, vocab, dtype=torch.float32),)

    yield Case(f"most likely, {rows} x {vocab}", logits, kernels.most_likely, lambda x: x.argmax(-1), moved)
    for name, top_k, tail in (("temperature", 0, 0.0), ("top-k 50", 50, 0.0), ("top-p 0.9", 0, 0.1)):

        def drawn(top_k: int = top_k, tail: float = tail) -> tuple[Any, ...]:
            one = torch.ones(rows, device=setting.place)
            keys = torch.arange(rows, device=setting.place)
            return *logits(), one, (top_k * one).int(), tail * one, -torch.inf * one, keys

        yield Case(f"draw by {name}, {rows} x {vocab}", drawn, kernels.draw, _torch_draw(top_k, tail), 2 * moved)


def _torch_draw(top_k: int, tail: float) -> Callable[..., object]:
    def draw(logits, *_parameters):
        if top_k:
            values, ids = logits.topk(min(top_k, logits.shape[1]))
            return ids.gather(1, _exponential_race(values.softmax(-1)))
        if tail:
            values, ids = logits.sort(dim=-1, descending=True)
            odds = values.softmax(-1)
            return ids.gather(1, _exponential_race(odds.masked_fill(odds.cumsum(-1) - odds > 1 - tail, 0.0)))
        return _exponential_race(logits.softmax(-1))

    return draw


def _exponential_race(odds):
    """A draw without the synchronization of torch.multinomial."""
    return (odds / torch.empty_like(odds).exponential_()).argmax(-1, keepdim=True)


def _products(setting: Setting) -> Iterator[Case]:
    spec, size = setting.spec, setting.torch_dtype.itemsize
    inputs, outputs = spec.hidden_size, 2 * spec.intermediate_size
    for tokens in (setting.size(32, 2), setting.size(8192, 16)):
        moved = (tokens * (inputs + outputs) + inputs * outputs) * size
        flops = 2 * tokens * inputs * outputs

        def plain(tokens: int = tokens) -> tuple[Any, ...]:
            return Linear(setting.random(outputs, inputs)), setting.random(tokens, inputs)

        def multiply(layer, x):
            return layer(x)

        yield Case(f"product, {tokens} x {inputs} x {outputs}", plain, multiply, None, moved, flops)
        if setting.smoke or setting.in_fp8:

            def in_fp8(tokens: int = tokens) -> tuple[Any, ...]:
                weight = setting.random(outputs, inputs)
                layer = Fp8Linear(weight, quantize_rows=setting.kernels.quantize_rows)
                return layer, setting.random(tokens, inputs), weight

            name = f"the same in fp8 with its rows' scales, {tokens}"
            ours, theirs = (lambda layer, x, _: layer(x)), (lambda _, x, weight: F.linear(x, weight))
            yield Case(name, in_fp8, ours, theirs, moved - inputs * outputs * (size - 1), flops)
