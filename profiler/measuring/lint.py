"""lint(): rows of a profile that cannot be true. Cheap and without torch, so every load runs it.

    rates     no row exceeds the bandwidth or the FLOP/s measured on the device
    growth    no time falls as the work grows, beyond noise
    rows      no duplicates, nothing infinite or not above zero, no row that never settled

Bytes that must come from memory: a layer's weights and its keys and values once a pass, less what can stay in the
cache until the next pass. Weights are known from below only: all of them less two tables of the vocabulary.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

import numpy as np

from exeplan.core.models.layer_costs import (
    layer_parameters,
    layer_parameters_used,
    pairs_attended,
    tokens_attended,
)
from exeplan.core.models.model import DTYPE_BYTES
from exeplan.core.profile import Measurement, Profile

_RATE_TOLERANCE = 1.15
_FALL_TOLERANCE = 0.06
_MAX_SPREAD = 0.25
_LAYER_OPS = ("attention", "rest")
_HOST_NOISE = 30e-6
"""Seconds of noise allowed on work that happens once a pass."""


def lint(profile: Profile) -> list[str]:
    """One sentence for every finding, naming its row; empty when nothing is wrong."""
    sound = [m for m in profile.measurements if math.isfinite(m.seconds) and m.seconds > 0]
    return [
        *_duplicates(profile.measurements),
        *(f"{row_name(m)}: {m.seconds} s is not a time" for m in profile.measurements if m not in sound),
        *_spreads(sound),
        *(_rates(profile, sound)),
        *_falls(sound),
    ]


def row_name(m: Measurement) -> str:
    """How a finding calls a row: its op, phase, and the axes that apply."""
    axes = [f"{name}={value}" for name in ("num_seqs", "num_tokens", "context_tokens") if (value := getattr(m, name))]
    return " ".join([m.op, *([m.phase] if m.phase else []), *axes])


def _duplicates(rows: Iterable[Measurement]) -> list[str]:
    return [f"{name} occurs {count} times" for name, count in Counter(map(row_name, rows)).items() if count > 1]


def _spreads(rows: Iterable[Measurement]) -> list[str]:
    return [
        f"{row_name(m)}: its repeats differ by {m.spread:.0%} of their median, so it never settled"
        for m in rows
        if not m.spread <= _MAX_SPREAD
    ]


def _rates(profile: Profile, rows: Iterable[Measurement]) -> Iterator[str]:
    device, windows = profile.device, profile.model.windows
    for m in rows:
        flops, moved = _flops(profile, m, windows), _moved(profile, m, windows)
        if flops > _RATE_TOLERANCE * device.flops_per_second * m.seconds:
            yield (
                f"{row_name(m)}: {flops / m.seconds / 1e9:.4g} GFLOP/s is beyond the device's matrix rate of "
                f"{device.flops_per_second / 1e9:.4g}"
            )
        if moved > _RATE_TOLERANCE * device.copy_bytes_per_second * m.seconds:
            yield (
                f"{row_name(m)}: {moved / m.seconds / 1e9:.4g} GB/s is beyond the device's copy bandwidth of "
                f"{device.copy_bytes_per_second / 1e9:.4g}"
            )


def _flops(profile: Profile, m: Measurement, windows: Mapping[int | None, int]) -> float:
    """Operations that the row must execute."""
    spec, size = profile.model, DTYPE_BYTES[profile.dtype]
    if m.op == "rest":
        return 2.0 * m.num_tokens * _used(profile) * _layer_bytes(profile, m.phase) / size
    if m.op == "head":
        return 2.0 * m.num_seqs * spec.vocab_size * spec.hidden_size
    if m.op == "attention":
        each = (
            pairs_attended(windows, m.num_tokens / m.num_seqs)
            if m.phase == "prefill"
            else tokens_attended(windows, m.context_tokens / m.num_seqs)
        )
        return 4.0 * spec.num_heads * spec.head_dim * m.num_seqs * each
    return 0.0


def _moved(profile: Profile, m: Measurement, windows: Mapping[int | None, int]) -> float:
    """Bytes that the row must fetch from memory."""
    if m.op == "rest":
        return _used(profile) * _layer_bytes(profile, m.phase) * _cold_share(profile, m.phase, 0)
    if m.op == "head":
        head = profile.model.vocab_size * profile.model.hidden_size * DTYPE_BYTES[profile.dtype]
        return head * _cold_share(profile, m.phase, 0)
    if m.op == "attention" and m.phase == "decode":
        tokens = m.num_seqs * tokens_attended(windows, m.context_tokens / m.num_seqs)
        kv = tokens * profile.model.kv_bytes_per_token(profile.cache_dtype)
        return kv / profile.model.num_layers * _cold_share(profile, m.phase, kv)
    return 0.0


def _used(profile: Profile) -> float:
    """The share of a layer's weights that one token is multiplied with; of a mixture, any pass reads no less."""
    spec = profile.model
    return layer_parameters_used(spec) / layer_parameters(spec) if spec.experts else 1.0


def _layer_bytes(profile: Profile, phase: str) -> float:
    """A lower bound of the weight bytes of a layer that runs in a phase."""
    spec = profile.model
    tables = 2 * spec.vocab_size * spec.hidden_size * DTYPE_BYTES[profile.dtype]
    layer, encoder_layer = layer_parameters(spec), layer_parameters(spec, encoder=True)
    all_layers = spec.num_layers * layer + spec.num_encoder_layers * encoder_layer
    own = encoder_layer if spec.is_encoder_decoder and phase == "prefill" else layer
    return max(0.0, (profile.weight_bytes - tables) * own / all_layers)


def _cold_share(profile: Profile, phase: str, kv_bytes: float) -> float:
    """The share of a pass's bytes that cannot still be cached from the previous pass.

    The profiler rotates over four times the cache at least, so no more than a quarter was ever kept there.
    """
    if profile.device.cache_bytes == 0:
        return 1.0
    layers = profile.model.num_encoder_layers if phase == "prefill" else 0
    pass_bytes = _layer_bytes(profile, phase) * (layers or profile.model.num_layers) + kv_bytes
    return max(0.0, 1.0 - profile.device.cache_bytes / max(1.0, min(pass_bytes, 4.0 * profile.device.cache_bytes)))


def _falls(rows: list[Measurement]) -> Iterator[str]:
    """Along each axis of each op, with the other axes fixed."""
    rests = {phase: _rest_curve(rows, phase) for phase in ("prefill", "decode")}
    groups: dict[tuple[str, str, int], list[Measurement]] = {}
    for m in rows:
        fixed = m.num_seqs if m.op == "attention" else 0
        groups.setdefault((m.op, m.phase, fixed), []).append(m)
    for group in groups.values():
        ordered = sorted(group, key=lambda m: (m.num_seqs, m.num_tokens, m.context_tokens))
        for less, more in pairwise(ordered):
            # Attention is what a layer takes beyond its rest, so the noise is that of the layer.
            layer = (
                float(np.interp(more.num_tokens or more.num_seqs, *rests[more.phase]))
                if more.op == "attention"
                else 0.0
            )
            noise = _FALL_TOLERANCE * (less.seconds + layer) + 2 * (
                less.spread * less.seconds + more.spread * more.seconds
            )
            if more.seconds < less.seconds - noise - (0.0 if more.op in _LAYER_OPS else _HOST_NOISE):
                yield (
                    f"{row_name(more)}: {more.seconds * 1e3:.4g} ms is less than the {less.seconds * 1e3:.4g} ms of "
                    f"{row_name(less)}"
                )


def _rest_curve(rows: list[Measurement], phase: str) -> tuple[list[int], list[float]]:
    points = sorted((m.num_tokens, m.seconds) for m in rows if m.op == "rest" and m.phase in ("", phase))
    return ([n for n, _ in points], [s for _, s in points]) if points else ([0], [0.0])
