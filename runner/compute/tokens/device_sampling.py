"""Sampling on the device: a token for each row of logits, copied to the host asynchronously.

The parameters of all rows are sent as two small tensors; a fixed number of launches applies them, for any number of
rows. Tokens are those of `sampling.sample`, except where two of them tie within rounding: the noise is the same hash of
seed, position and token. The host only lists the logits that rows change (bias, penalties, bans); it reads none.

Letters: R rows, V vocabulary, L rows that report log-probabilities, J most likely tokens of these, X logits to change,
flattened. Not here: the CPU's path (`sampling.py`), which is faster there, by numpy.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exeplan.kernels.select import Kernels
from exeplan.kernels.to_device import to_device
from exeplan.runner.compute.tokens.noise import noise_key, signed
from exeplan.runner.compute.tokens.sampling import SampledToken, SamplingInput, SamplingParams

_ALIGNED = 4
"""Numbers in 16 bytes: the kernel is recompiled for pointers that are not aligned to 16 bytes."""
_NO_MASKS: Mapping[int, NDArray[np.uint8]] = MappingProxyType({})


class DeviceSamples:
    """Sampled tokens of one batch, on the device and being copied to the host."""

    def __init__(self, token_R: Tensor, sound_R: Tensor, reported: "_Reported | None") -> None:
        self.token_R, self.sound_R = token_R, sound_R
        """int64, and bool: whether the row's largest logit was finite; inputs of the next step."""
        self._reported = reported
        wanted = [token_R, sound_R, *(reported.tensors(token_R) if reported else ())]
        # Ordered after the launches so far and before those of the next step, which overwrite these tensors.
        self._host = [tensor.to("cpu", non_blocking=True, copy=True) for tensor in wanted]
        self._copied: torch.cuda.Event | None = None
        if token_R.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch has no types here
            self._copied.record()

    def to_host(self) -> list[SampledToken | None]:
        """One token for each row, None where its logits were not finite. Waits for their copy only."""
        if self._copied:
            self._copied.synchronize()
        tokens, sound = self._host[0].tolist(), self._host[1].tolist()
        found = [SampledToken(token) if fine else None for token, fine in zip(tokens, sound, strict=True)]
        if self._reported:
            chosen, ids, values = (tensor.tolist() for tensor in self._host[2:])
            for number, (row, count) in enumerate(self._reported.wanted):
                if found[row]:
                    top = tuple(zip(ids[number][:count], values[number][:count], strict=True))
                    found[row] = SampledToken(tokens[row], chosen[number], top)
        return found


def sample_on_device(
    logits_RV: Tensor,
    rows: Sequence[SamplingInput],
    kernels: Kernels,
    *,
    positions: Sequence[int] | None = None,
    masks: Mapping[int, NDArray[np.uint8]] = _NO_MASKS,
) -> DeviceSamples:
    """Launches the sampling of one token for each row of logits (float32), which are overwritten.

    `positions` counts the output tokens before each row's new one; by default those that the host knows. A row whose
    last token is still on the device has one more; `needs_tokens` must not hold for it. `masks` are those of `sample`.
    """
    logits_RV = logits_RV.contiguous()
    where = [len(row.output_token_ids) for row in rows] if positions is None else positions
    if all(row.plain for row in rows):
        return DeviceSamples(*kernels.most_likely(logits_RV), None)
    reported = _report(logits_RV, rows)
    _edit(logits_RV, rows, where)
    _allow(logits_RV, rows, masks)
    if not any(row.sampling.temperature for row in rows):
        return DeviceSamples(*kernels.most_likely(logits_RV), reported)
    return DeviceSamples(*kernels.draw(logits_RV, *_parameters(rows, where, logits_RV.device)), reported)


def needs_tokens(rows: Sequence[SamplingInput]) -> bool:
    """Whether sampling a row needs its earlier tokens, not only their number: then the host must know all of them."""
    return any(not row.plain and (row.sampling.penalises or row.sampling.structure is not None) for row in rows)


def _parameters(rows: Sequence[SamplingInput], positions: Sequence[int], device: torch.device) -> list[Tensor]:
    """The arguments of `kernels.draw` after the logits, by one copy."""
    count, places = len(rows), -(-len(rows) // _ALIGNED) * _ALIGNED
    joined = np.zeros(3 * places, dtype=np.int64)
    joined[:count] = [signed(noise_key(row.seed, where)) for row, where in zip(rows, positions, strict=True)]
    numbers = joined[places:].view(np.float32).reshape(4, places)
    numbers[:3, :count] = np.array([_drawing(row.sampling) for row in rows], dtype=np.float32).T
    numbers[3].view(np.int32)[:count] = [max(row.sampling.top_k, 0) for row in rows]
    on_device = to_device(joined, device)
    numbers_4R = on_device[places:].view(torch.float32).view(4, places).narrow(1, 0, count)
    temperature_R, tail_R, least_R, top_k_R = numbers_4R.unbind(0)
    return [temperature_R, top_k_R.view(torch.int32), tail_R, least_R, on_device[:count]]


def _drawing(params: SamplingParams) -> tuple[float, float, float]:
    """Temperature, the probability that top-p cuts off, and the logarithm of min-p."""
    return params.temperature, 1.0 - params.top_p, math.log(params.min_p) if params.min_p else -math.inf


class _Reported(NamedTuple):
    """Log-probabilities by the model's own distribution, before parameters change the logits."""

    wanted: list[tuple[int, int]]
    """Rows, and how many of the most likely tokens each reports."""
    rows: Tensor
    logprobs: Tensor
    """`[L, V]`."""

    def tensors(self, token_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of the sampled tokens `[L]`, and ids and values of the most likely `[L, J]`."""
        top = self.logprobs.topk(min(max(count for _, count in self.wanted), self.logprobs.shape[1]))
        return self.logprobs.gather(1, token_R[self.rows, None])[:, 0], top.indices, top.values


def _report(logits_RV: Tensor, rows: Sequence[SamplingInput]) -> _Reported | None:
    wanted = [(number, count) for number, row in enumerate(rows) if (count := row.sampling.logprobs) is not None]
    if not wanted:
        return None
    row_L = to_device(np.array([number for number, _ in wanted], dtype=np.int64), logits_RV.device)
    return _Reported(wanted, row_L, logits_RV[row_L].log_softmax(-1))


class _Entries:
    """The logits that rows change, and the values of the change."""

    def __init__(self, vocab_size: int) -> None:
        self._size = vocab_size
        self._places: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.float32]] = []

    def add(self, row: int, token_ids: Sequence[int], values: float | Sequence[float] = 0.0) -> None:
        tokens = np.asarray(token_ids, dtype=np.int64)
        self._places.append(tokens + row * self._size)
        self._values.append(np.broadcast_to(np.asarray(values, dtype=np.float32), tokens.shape))

    def apply(self, logit_X: Tensor, change: Callable[[Tensor, Tensor, Tensor], object]) -> None:
        """Calls `change` with all logits, the indices and the values, unless there are none."""
        if sum(map(len, self._places)):
            values = np.concatenate(self._values).view(np.int32)
            both = to_device(np.concatenate([np.concatenate(self._places), values]), logit_X.device)
            place_X, bits_X = both.chunk(2)
            change(logit_X, place_X, bits_X.to(torch.int32).view(torch.float32))


def _edit(logits_RV: Tensor, rows: Sequence[SamplingInput], positions: Sequence[int]) -> None:
    """Bans, bias and penalties, in this order."""
    bans, biases, repeated, present, frequent = (_Entries(logits_RV.shape[1]) for _ in range(5))
    for number, (row, position) in enumerate(zip(rows, positions, strict=True)):
        params = row.sampling
        if row.plain:
            continue
        if position < params.min_tokens and params.structure is None:
            bans.add(number, row.banned_token_ids)
        if params.logit_bias:
            biases.add(number, list(params.logit_bias), list(params.logit_bias.values()))
        if params.repetition_penalty != 1.0:
            repeated.add(number, [*row.prompt_token_ids, *row.output_token_ids], params.repetition_penalty)
        if params.presence_penalty:
            present.add(number, row.output_token_ids, params.presence_penalty)
        if params.frequency_penalty:
            frequent.add(number, row.output_token_ids, params.frequency_penalty)
    logit_X = logits_RV.view(-1)
    bans.apply(logit_X, lambda logit_X, place_X, _: logit_X.index_fill_(0, place_X, -math.inf))
    biases.apply(logit_X, lambda logit_X, place_X, value_X: logit_X.index_add_(0, place_X, value_X))
    repeated.apply(logit_X, _penalise_repetition)
    present.apply(logit_X, _penalise_presence)
    frequent.apply(logit_X, lambda logit_X, place_X, value_X: logit_X.index_add_(0, place_X, value_X, alpha=-1.0))


def _allow(logits_RV: Tensor, rows: Sequence[SamplingInput], masks: Mapping[int, NDArray[np.uint8]]) -> None:
    """Only the tokens whose bits are set, in rows that have a grammar. The bits are unpacked on the device."""
    wanted = [i for i, row in enumerate(rows) if not row.plain and row.sampling.structure is not None]
    if not wanted:
        return
    vocab_size = logits_RV.shape[1]
    packed = np.zeros((len(wanted), -(-vocab_size // 8)), dtype=np.uint8)
    for number, i in enumerate(wanted):
        packed[number, : len(masks[i])] = masks[i][: packed.shape[1]]
    packed_GW = to_device(packed, logits_RV.device)
    shift = torch.arange(8, dtype=torch.uint8, device=logits_RV.device)
    allowed_GV = ((packed_GW[:, :, None] >> shift) & 1).view(len(wanted), -1)[:, :vocab_size].bool()
    row_G = to_device(np.array(wanted, dtype=np.int64), logits_RV.device)
    logits_RV[row_G] = logits_RV[row_G].masked_fill(~allowed_GV, -math.inf)


def _penalise_repetition(logit_X: Tensor, place_X: Tensor, penalty_X: Tensor) -> None:
    """An index that occurs twice is written twice with the same value."""
    value_X = logit_X[place_X]
    logit_X[place_X] = torch.where(value_X > 0, value_X / penalty_X, value_X * penalty_X)


def _penalise_presence(logit_X: Tensor, place_X: Tensor, penalty_X: Tensor) -> None:
    """As for repetition, an index may occur twice."""
    logit_X[place_X] = logit_X[place_X] - penalty_X
