"""Sampling defaults of a server: those of the model's generation_config.json, for fields that a request leaves out.

Source: vLLM and SGLang, which take the same fields of it. Not here: `do_sample`, which neither of them takes.
"""

import logging

from exeplan.core.models.generation_config import generation_config
from exeplan.core.models.model import ModelSpec
from exeplan.errors import InputError
from exeplan.runner.compute.tokens.sampling import SamplingParams

log = logging.getLogger(__name__)
_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_defaults(spec: ModelSpec) -> dict[str, float]:
    """By fields of `SamplingParams`; what is outside their limits is left out with a warning."""
    stated, defaults = generation_config(spec), {}
    for name in _FIELDS:
        if (value := stated.get(name)) is None:
            continue
        try:
            SamplingParams(**{name: value})
        except InputError as error:
            log.warning("generation_config.json is not followed here: %s", error)
        else:
            defaults[name] = value
    return defaults
