"""Rotary position embedding with the scalings that Hugging Face configs name.

Letters: N tokens, M heads, D rotated dimensions of a head. Source: `transformers/modeling_rope_utils.py`, whose
numbers these are; Su et al. 2021 (RoPE), Peng et al. 2023 (YaRN), Ding et al. 2024 (LongRoPE).

Old configs have `rope_theta` and `rope_scaling`, newer ones `rope_parameters`; both are read.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exeplan.core.models.model import ModelSpec
from exeplan.errors import InputError
from exeplan.kernels.select import Kernels


@dataclass(frozen=True, slots=True)
class Angles:
    """Cosine and signed sine of every token's rotation, `[N, 1, D]`, shared by all layers of a pass."""

    cos: Tensor
    sin: Tensor
    kernels: Kernels

    def rotate(self, x_NMD: Tensor) -> None:
        """Rotates the first D dimensions of every head, in place: dimension i pairs with i + D / 2."""
        self.kernels.rotate(x_NMD, self.cos, self.sin)


class Rotary:
    """Turns positions into angles. Raises InputError for an unknown scaling."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        dim: int | None = None,
        theta: float = 10000.0,
    ) -> None:
        parameters = rope_parameters(spec, theta)
        kind = parameters["rope_type"]
        if kind not in _SCALINGS:
            raise InputError(f"'{spec.name}': no rotary scaling '{kind}'; there are {', '.join(sorted(_SCALINGS))}")
        if (dim or spec.head_dim) % 2:
            raise InputError(
                f"'{spec.name}': rotary positions need an even number of dimensions, not {dim or spec.head_dim}"
            )
        self.dtype, self._kernels = dtype, kernels
        exponent = torch.arange(0, dim or spec.head_dim, 2, dtype=torch.float32, device=device) / (dim or spec.head_dim)
        try:
            self._scaling = _SCALINGS[kind](parameters, exponent, spec.num_positions)
        except KeyError as error:
            raise InputError(f"'{spec.name}': rotary scaling '{kind}' lacks {error}") from None
        except (TypeError, ValueError, ZeroDivisionError):
            raise InputError(
                f"'{spec.name}': rotary scaling '{kind}' has a setting that is no number: {parameters}"
            ) from None

    def __call__(self, position_N: Tensor, length_N: Tensor) -> Angles:
        """`length_N` is the sequence's length when the token was first computed; some scalings depend on it."""
        frequency, factor = self._scaling(length_N)
        angle_ND = position_N[:, None].float() * frequency
        cos_ND, sin_ND = angle_ND.cos() * factor, angle_ND.sin() * factor
        return Angles(
            torch.cat((cos_ND, cos_ND), -1)[:, None].to(self.dtype),
            torch.cat((-sin_ND, sin_ND), -1)[:, None].to(self.dtype),
            self._kernels,
        )


def rope_parameters(spec: ModelSpec, theta: float) -> dict[str, Any]:
    """The rotary settings of a config in the new format."""
    config = spec.config
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    parameters["rope_type"] = parameters.get("rope_type") or parameters.get("type") or "default"
    parameters.setdefault("rope_theta", config.get("rope_theta") or theta)
    parameters.setdefault("original_max_position_embeddings", spec.num_positions)
    if "original_max_position_embeddings" in config:
        parameters["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return parameters


def scaling_factor(parameters: Mapping[str, Any], num_positions: int) -> float:
    """What a scaling stretches the pretrained context by; where it is not stated, to the positions of the config."""
    stated: float | None = parameters.get("factor")
    return stated or num_positions / parameters["original_max_position_embeddings"]


Scaling = Callable[[Tensor], tuple[Tensor, float]]
"""From the lengths `[N]` to frequencies, `[D / 2]` or `[N, D / 2]`, and the factor on cosine and sine."""


def _default(parameters: Mapping[str, Any], exponent: Tensor, _num_positions: int) -> Scaling:
    frequency = 1.0 / parameters["rope_theta"] ** exponent
    return lambda _length_N: (frequency, 1.0)


def _linear(parameters: Mapping[str, Any], exponent: Tensor, _num_positions: int) -> Scaling:
    frequency = 1.0 / parameters["rope_theta"] ** exponent / parameters["factor"]
    return lambda _length_N: (frequency, 1.0)


def _dynamic(parameters: Mapping[str, Any], exponent: Tensor, num_positions: int) -> Scaling:
    """NTK-aware: the base grows with sequences longer than the pretrained context."""
    theta, factor = parameters["rope_theta"], parameters["factor"]
    dim = 2 * len(exponent)

    def scale(length_N: Tensor) -> tuple[Tensor, float]:
        growth_N = factor * length_N.clamp(min=num_positions).float() / num_positions - (factor - 1)
        base_N = theta * growth_N ** (dim / (dim - 2))
        return 1.0 / base_N[:, None] ** exponent, 1.0

    return scale


def _llama3(parameters: Mapping[str, Any], exponent: Tensor, _num_positions: int) -> Scaling:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    original = parameters["original_max_position_embeddings"]
    low, high, factor = parameters["low_freq_factor"], parameters["high_freq_factor"], parameters["factor"]
    frequency = 1.0 / parameters["rope_theta"] ** exponent
    wavelength = 2 * math.pi / frequency
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * frequency / factor + smooth * frequency
    scaled = torch.where(wavelength > original / low, frequency / factor, frequency)
    scaled = torch.where((wavelength >= original / high) & (wavelength <= original / low), between, scaled)
    return lambda _length_N: (scaled, 1.0)


def _yarn(parameters: Mapping[str, Any], exponent: Tensor, num_positions: int) -> Scaling:
    """High frequencies are kept, low ones interpolated, by their rotations within the pretrained context."""
    original = parameters["original_max_position_embeddings"]
    factor = scaling_factor(parameters, num_positions)
    theta, dim = parameters["rope_theta"], 2 * len(exponent)

    def dimension(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dimension(parameters.get("beta_fast") or 32), dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device=exponent.device) - low) / (high - low)).clamp(0, 1)
    base = theta**exponent
    frequency = 1.0 / (factor * base) * ramp + 1.0 / base * (1 - ramp)
    magnitude = _yarn_magnitude(parameters, factor)
    return lambda _length_N: (frequency, magnitude)


def _yarn_magnitude(parameters: Mapping[str, Any], factor: float) -> float:
    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return grown(above) / grown(below) if above and below else grown(1.0)


def _longrope(parameters: Mapping[str, Any], exponent: Tensor, num_positions: int) -> Scaling:
    """One factor per dimension within the pretrained context, another beyond it."""
    original = parameters["original_max_position_embeddings"]
    growth = scaling_factor(parameters, num_positions)
    magnitude = parameters.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0
    base = parameters["rope_theta"] ** exponent
    short, long = (
        1.0 / (torch.tensor(parameters[name], dtype=torch.float32, device=exponent.device) * base)
        for name in ("short_factor", "long_factor")
    )
    return lambda length_N: (torch.where(length_N[:, None] > original, long, short), float(magnitude))


_SCALINGS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
