"""Random models as checkpoints, so that every device loads the same weights: a GPU draws other random numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from exeplan.core.models.model import ModelSpec, load_model_spec, model_spec
from exeplan.runner.compute import families
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.weights.checkpoint import RandomWeights

_SPREAD = 5.0
"""Factor on the weights that keeps logits apart."""


def checkpoint(config: dict[str, Any], folder: Path) -> ModelSpec:
    """Writes a model of that shape with random weights."""
    taken: dict[str, torch.Tensor] = {}

    class Kept(RandomWeights):
        def _draw(self, name: str, sizes: Any) -> torch.Tensor:
            if name not in taken:
                drawn = super()._draw(name, sizes)
                taken[name] = drawn * _SPREAD if len(sizes) > 1 else drawn
            return taken[name].clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "RandomWeights", Kept)
        ModelRunner(model_spec(config, name="tiny"), num_blocks=1, dummy_weights=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(taken, folder / "model.safetensors")
    return load_model_spec(str(folder))
