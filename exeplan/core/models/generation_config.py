"""generation_config.json of a model directory: how the authors of a checkpoint generate with it."""

from collections.abc import Mapping
from typing import Any

from exeplan.core.models.model import ModelSpec
from exeplan.files import read_json


def generation_config(spec: ModelSpec) -> Mapping[str, Any]:
    """What the file says; nothing where there is none. Raises InputError for one that cannot be read."""
    path = spec.directory / "generation_config.json" if spec.directory else None
    return read_json(path) if path and path.is_file() else {}


def generation_setting(spec: ModelSpec, name: str) -> Any:
    """What the file says of it, else the model's config; None where neither does."""
    stated = generation_config(spec).get(name)
    return spec.config.get(name) if stated is None else stated
