"""ModelRunner: a model with its weights and KV cache on one device; turns a batch into logits.

It is the data plane only: what runs next is decided by `exeplan.scheduling`, what a logit becomes by
`runner/sampling.py`.
"""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from exeplan.errors import InputError
from exeplan.model import RUN_DTYPES, ModelSpec
from exeplan.runner.checkpoint import Checkpoint, RandomWeights, Weights
from exeplan.runner.kv_cache import KVCache
from exeplan.runner.layers import Model
from exeplan.runner.step import Row, Step
from exeplan.scheduling import Batch, num_blocks_for
from exeplan.scheduling import Sequence as SequenceState


class ModelRunner:
    """One model on one device."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        num_blocks: int,
        dummy_weights: bool = False,
        seed: int = 0,
    ) -> None:
        """Loads the weights, or draws random ones. Raises InputError naming what the model or its checkpoint lacks."""
        self.spec, self.dtype, self.device = spec, dtype, torch.device(device)
        with torch.inference_mode():
            self.model, self.weight_bytes = load_model(
                spec, dtype=dtype, device=device, dummy_weights=dummy_weights, seed=seed
            )
            self.cache = KVCache(spec, num_blocks, _torch_dtype(dtype), self.device)
        self._residents: dict[str, SequenceState] = {}

    @torch.inference_mode()
    def forward(self, batch: Batch, token_ids: Mapping[str, Sequence[int]]) -> Tensor:
        """Logits `[R, V]` in float32, one row per prefilled and then per decoded sequence of the batch.

        `token_ids[request_id]` are prompt and output so far. A prefilled row computes all of them, a decoded row the
        last. Keys and values find their place here, in as many blocks as the scheduler granted.
        """
        self._place(batch)
        step = self.step(batch, token_ids)
        hidden_NE = self.model.embed(step.token_N, step.position_N)
        angles = self.model.angles(step.position_N, step.length_N)
        for layer in self.model.layers:
            hidden_NE = layer(hidden_NE, angles, step.attend)
        return self.model.head(hidden_NE[step.logit_R]).float()

    def step(self, batch: Batch, token_ids: Mapping[str, Sequence[int]]) -> Step:
        """The batch as tensors."""
        prefill, decode = (
            [Row(request_id=s.request_id, num_tokens=s.num_tokens, num_prompt_tokens=s.num_prompt_tokens) for s in rows]
            for rows in (batch.prefill, batch.decode)
        )
        return Step(self.cache, prefill, decode, token_ids=token_ids, pad_to=batch.pad_to)

    def free(self, request_id: str) -> None:
        """Frees the blocks of a request that left; one that never ran is fine."""
        self._residents.pop(request_id, None)
        self.cache.free(request_id)

    def _place(self, batch: Batch) -> None:
        """Gives every row the blocks that it was granted, after taking back those of sequences that hold none."""
        for sequence in [*batch.prefill, *(s for s in self._residents.values() if s.num_blocks == 0)]:
            self.free(sequence.request_id)
        for sequence in (*batch.decode, *batch.prefill):
            hint = num_blocks_for(sequence.num_prompt_tokens + sequence.max_output_tokens)
            self.cache.resize(sequence.request_id, sequence.num_blocks, hint)
            self._residents[sequence.request_id] = sequence


def load_model(spec: ModelSpec, *, dtype: str, device: str, dummy_weights: bool, seed: int = 0) -> tuple[Model, int]:
    """The model of a spec and the bytes of its weights. Raises InputError when it cannot be run."""
    family = _family(spec)
    kind, place = _torch_dtype(dtype), torch.device(device)
    weights: Weights
    if dummy_weights or spec.directory is None:
        weights = RandomWeights(dtype=kind, device=place, seed=seed)
    else:
        weights = Checkpoint(spec.directory, dtype=kind, device=place, prefix=family.PREFIX)
    model: Model = family.Model(spec, weights)
    return model, weights.num_bytes


def family_names() -> list[str]:
    """All families, sorted: the files in `runner/models`."""
    return sorted(path.stem for path in (Path(__file__).parent / "models").glob("[a-z]*.py"))


def _family(spec: ModelSpec) -> ModuleType:
    if spec.family not in family_names():
        raise InputError(f"no model family '{spec.family}'; there are {', '.join(family_names())}")
    if quantization := spec.config.get("quantization_config"):
        method = (
            quantization.get("quant_method", "an unknown method") if isinstance(quantization, dict) else quantization
        )
        raise InputError(
            f"'{spec.name}' is quantized by {method}, which is not supported; use its unquantized checkpoint"
        )
    return importlib.import_module(f"exeplan.runner.models.{spec.family}")


def _torch_dtype(name: str) -> torch.dtype:
    if name not in RUN_DTYPES:
        raise InputError(f"no dtype '{name}'; there are {', '.join(RUN_DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
