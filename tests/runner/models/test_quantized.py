"""A quantized checkpoint gives transformers' tokens with the weights that it means, whatever form the device holds."""

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from exeplan.core.batch import Batch, SequenceState, num_blocks_for
from exeplan.core.model import load_model_spec
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.kernels.int4_linear import Int4Linear, multiplies_int4
from exeplan.kernels.int8_linear import Int8Linear, multiplies_int8
from exeplan.runner.compute.model_runner import ModelRunner

from .quantized_checkpoints import FAMILIES, LAYOUTS, W8A8, copied, save
from .test_models import generate, prompt, serve

CPU = torch.device("cpu")
CASES = [(family, layout) for family in FAMILIES for layout in LAYOUTS]
every_case = pytest.mark.parametrize(("family", "layout"), CASES, ids=[f"{one}-{two}" for one, two in CASES])
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    @functools.cache
    def make(family: str, layout: str) -> tuple[Path, PreTrainedModel]:
        return save(tmp_path_factory.mktemp("checkpoint"), family, {**LAYOUTS, "w8a8": W8A8}[layout])

    return make


def logits(directory: Path, dtype: str) -> Tensor:
    """Of three prompts and of a decode after them."""
    runner = ModelRunner(load_model_spec(str(directory)), dtype=dtype, num_blocks=16)
    texts = {str(size): prompt(size + 1, seed=size) for size in (5, 17, 29)}
    found = []
    for count in range(2):
        rows = tuple(
            SequenceState(
                request_id=name,
                num_prompt_tokens=len(ids) - 1,
                max_output_tokens=2,
                num_output_tokens=count,
                num_blocks=num_blocks_for(len(ids)),
            )
            for name, ids in texts.items()
        )
        found.append(runner.forward(Batch(decode=rows) if count else Batch(prefill=rows), texts))
    return torch.cat(found)


def expected_logits(model: PreTrainedModel) -> Tensor:
    rows = []
    for count in range(2):
        for size in (5, 17, 29):
            rows.append(model(torch.tensor([prompt(size + 1, seed=size)[: size + count]])).logits[0, -1])
    return torch.stack(rows).float()


def error(found: Tensor, expected: Tensor) -> float:
    """Of logits about their mean, which no choice of a token sees."""
    found, expected = (part - part.mean(-1, keepdim=True) for part in (found, expected))
    return float((found - expected).norm() / expected.norm())


@every_case
def test_tokens_equal_those_of_the_weights_that_are_meant(family, layout, checkpoint):
    directory, model = checkpoint(family, layout)
    runner = ModelRunner(load_model_spec(str(directory)), dtype="float32", num_blocks=16)
    requests = [(prompt(3 + 9 * n, seed=n), 6 + 3 * n) for n in range(4)]
    found, _ = serve(runner, Schedule("orca", {"max_num_seqs": 3}), requests, num_blocks=16)
    assert found == [generate(model, ids, count) for ids, count in requests]


@every_case
@torch.no_grad()
def test_bfloat16_is_as_close_as_with_the_weights_that_are_meant(family, layout, checkpoint):
    directory, model = checkpoint(family, layout)
    expected = expected_logits(model)
    assert error(logits(directory, "float32"), expected) < 1e-4
    plain = error(logits(directory.parent / "plain", "bfloat16"), expected)
    flips = 2.0 if "moe" in family else 1.0  # Of routes, where two experts are nearly as likely.
    assert error(logits(directory, "bfloat16"), expected) < 1.5 * flips * plain + 2e-3
