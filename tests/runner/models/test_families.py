"""A model family is added as one file or as one row of `llama.VARIANTS`, and gives the tokens of transformers."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from exeplan.core.models.model import load_model_spec
from exeplan.core.schedule import Schedule
from exeplan.runner import models
from exeplan.runner.compute.families import family_names
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.models import llama

from .test_models import ROTARY, generate, prompt, serve

OLMO = '''"""OLMo: Llama's layer with a LayerNorm that has no weights."""

from exeplan.runner.compute.blocks.layers import (
    LayerNorm,
    SelfAttention,
    added,
    attention_shape,
    gated_mlp,
    projections,
    wanted_rows,
)
from exeplan.runner.compute.blocks.rotary import Rotary
from exeplan.runner.compute.weights.vocabulary import Vocabulary

PREFIX = "model."
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Model:
    def __init__(self, spec, weights, shard):
        self.vocabulary = Vocabulary(weights, shard, EMBEDDING, HEAD, spec.vocab_size, spec.hidden_size)
        self.angles = Rotary(spec, dtype=weights.dtype, device=weights.device, kernels=weights.kernels)
        self.layers = [Layer(spec, weights, shard, index) for index in range(*shard.layers)]
        self.norm = LayerNorm(weights, "", spec.hidden_size, affine=False)

    def embed(self, token_N, position_N):
        return self.vocabulary.embed(token_N)

    def head(self, hidden_RE):
        return self.vocabulary.logits(self.norm(hidden_RE))


class Layer:
    def __init__(self, spec, weights, shard, index):
        name = f"model.layers.{index}"
        self.norm = LayerNorm(weights, "", spec.hidden_size, affine=False)
        products = projections(weights, spec, shard.group, f"{name}.self_attn", qkv_bias=False, output_bias=False)
        self.attention = SelfAttention(attention_shape(spec, shard, index), *products)
        self.mlp = gated_mlp(weights, spec, shard.group, f"{name}.mlp")

    def __call__(self, hidden_NE, angles, attend, wanted_R=None):
        residual_RE, attend = wanted_rows(hidden_NE, attend, wanted_R)
        attended_RE = self.attention(self.norm(hidden_NE), angles, attend)
        return added(self.mlp, self.norm.of_sum(attended_RE, residual_RE), residual_RE)
'''


def assert_gives_the_tokens_of_transformers(model_type: str, directory: Path, **config: object) -> None:
    """Of a random checkpoint of two layers, whose weights are large enough that no two logits are close."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**ROTARY, **config)).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.15)
    model.save_pretrained(directory)
    runner = ModelRunner(load_model_spec(str(directory)), num_blocks=8)
    requests = [(prompt(9 + n, seed=n), 12) for n in range(2)]
    outputs, _ = serve(runner, Schedule("orca", {"max_num_seqs": 2}), requests, num_blocks=8)
    assert outputs == [generate(model, token_ids, count) for token_ids, count in requests]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    """A further folder of the package `runner/models`."""
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    yield tmp_path
    sys.modules.pop("exeplan.runner.models.olmo", None)


def test_a_file_is_a_family(folder, tmp_path_factory):
    assert "olmo" not in family_names()
    (folder / "olmo.py").write_text(OLMO)
    importlib.invalidate_caches()
    assert "olmo" in family_names()
    assert_gives_the_tokens_of_transformers("olmo", tmp_path_factory.mktemp("checkpoint"))


def test_a_row_is_a_family(monkeypatch, tmp_path):
    assert "seed_oss" not in family_names()
    row = llama.Variant(qkv_bias="attention_bias", output_bias="attention_out_bias", mlp_bias="mlp_bias")
    monkeypatch.setitem(llama.VARIANTS, "seed_oss", row)
    assert "seed_oss" in family_names()
    assert_gives_the_tokens_of_transformers("seed_oss", tmp_path, head_dim=16, attention_out_bias=True)


def test_a_name_has_one_family(folder):
    (folder / "olmo.py").write_text('VARIANTS = {"qwen2": None}')
    importlib.invalidate_caches()
    with pytest.raises(RuntimeError, match=r"model family 'qwen2' is in .*llama\.py and in .*olmo\.py"):
        family_names()
