"""A checkpoint is read, whole or in parts, or refused with the file and the tensor that is wrong; a pickle is never
opened.
"""

import json
import pickle

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.models.model import load_model_spec
from exeplan.errors import InputError
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.weights.checkpoint import INDEX, Checkpoint, RandomWeights
from exeplan.runner.compute.weights.shard import ShardRange

CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)


@pytest.fixture
def tensors():
    return {"model.weight": torch.arange(6.0).view(2, 3), "model.bias": torch.ones(3)}


def read(directory, **options) -> Checkpoint:
    return Checkpoint(directory, dtype=torch.float32, device=torch.device("cpu"), **options)


def logits(directory) -> torch.Tensor:
    sequence = SequenceState(request_id="a", num_prompt_tokens=4, max_output_tokens=1, num_blocks=1)
    runner = ModelRunner(load_model_spec(str(directory)), dtype="float32", device="cpu", num_blocks=1)
    return runner.forward(Batch(prefill=(sequence,)), {"a": [5, 6, 7, 8]})


def test_shards_give_the_same_model_as_one_file(tmp_path):
    model = LlamaForCausalLM(CONFIG)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert torch.equal(logits(tmp_path / "whole"), logits(tmp_path / "shards"))


def test_one_file_wins_over_an_index_that_was_left_behind(tmp_path, tensors, caplog):
    save_file(tensors, tmp_path / "model.safetensors")
    save_file({"model.weight": torch.zeros(2, 3)}, tmp_path / "old.safetensors")
    write_index(tmp_path, {"model.weight": "old.safetensors"})
    assert torch.equal(read(tmp_path).take("model.weight", 2, 3), tensors["model.weight"])
    assert "model.safetensors is read, and not the shards that model.safetensors.index.json names" in caplog.text


def test_a_checkpoint_of_the_bare_model_has_the_names_without_prefix(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": True}))
    model.save_pretrained(tmp_path / "causal")
    model.model.save_pretrained(tmp_path / "bare")
    assert torch.equal(logits(tmp_path / "causal"), logits(tmp_path / "bare"))


def test_tensors_are_converted_and_counted(tmp_path, tensors):
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    weights = read(tmp_path)
    assert torch.equal(weights.take("model.weight", 2, 3), tensors["model.weight"])
    assert weights.num_bytes == 6 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_a_range_of_a_dimension_is_taken_counted_and_checked(tmp_path, dtype):
    values = torch.arange(12.0).view(4, 3)
    values[3, 2] = torch.nan
    save_file({"a": values}, tmp_path / "model.safetensors")
    weights = Checkpoint(tmp_path, dtype=dtype, device=torch.device("cpu"))
    rows, columns = weights.take("a", ShardRange(4, 1, 3), 3), weights.take("a", 4, ShardRange(3, 0, 2))
    assert torch.equal(rows.float(), values[1:3])
    assert torch.equal(columns.float(), values[:, :2])
    assert columns.is_contiguous()
    assert weights.num_bytes == (6 + 8) * dtype.itemsize
    with pytest.raises(InputError, match="not finite"):
        weights.take("a", 4, ShardRange(3, 1, 3))


def test_a_range_of_a_tensor_of_another_shape_is_refused(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"has shape \[2, 3\].* \[4, 3\]"):
        read(tmp_path).take("model.weight", ShardRange(4, 0, 2), 3)


def test_random_weights_depend_on_the_name_only():
    whole, parts = (RandomWeights(dtype=torch.float32, device=torch.device("cpu"), seed=5) for _ in range(2))
    first, second = whole.take("a", 8, 6), whole.take("b", 8, 6)
    assert not torch.equal(first, second)
    assert torch.equal(parts.take("b", ShardRange(8, 2, 5), 6), second[2:5])
    assert torch.equal(parts.take("a", 8, ShardRange(6, 3, 6)), first[:, 3:])
    assert parts.num_bytes == (3 * 6 + 8 * 3) * 4
    assert parts.take("a", 8, ShardRange(6, 3, 6)).untyped_storage().nbytes() == 8 * 3 * 4


def test_a_missing_tensor_is_named(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"has no tensor 'model\.other'"):
        read(tmp_path).take("model.other", 2)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"'model\.weight' in .*model\.safetensors has shape \[2, 3\].* \[3, 2\]"):
        read(tmp_path).take("model.weight", 3, 2)


def test_integer_weights_are_refused(tmp_path):
    save_file({"a": torch.ones(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"'a' .* torch\.int8, which its config\.json does not say how to "):
        read(tmp_path).take("a", 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_a_tensor_that_is_not_finite_in_the_asked_dtype_is_named(tmp_path, value):
    save_file({"a": torch.tensor([1.0, value])}, tmp_path / "model.safetensors")
    weights = Checkpoint(tmp_path, dtype=torch.float16, device=torch.device("cpu"))
    with pytest.raises(
        InputError, match=r"'a' in .*model\.safetensors holds values that are not finite in torch\.float16"
    ):
        weights.take("a", 2)


@pytest.mark.parametrize("keep", [0, 5, 60, 150])
def test_a_truncated_file_is_named(tmp_path, tensors, keep):
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"model\.safetensors is not a readable safetensors file"):
        read(tmp_path)


def test_a_truncated_shard_is_named_with_the_tensor(tmp_path, tensors):
    save_file(tensors, tmp_path / "one.safetensors")
    (tmp_path / "one.safetensors").write_bytes(b"\x00" * 20)
    write_index(tmp_path, {"model.weight": "one.safetensors"})
    with pytest.raises(InputError, match=r"cannot read tensor 'model\.weight' from .*one\.safetensors"):
        read(tmp_path).take("model.weight", 2, 3)


def test_an_index_that_names_a_tensor_missing_in_its_shard_is_refused(tmp_path, tensors):
    save_file(tensors, tmp_path / "one.safetensors")
    write_index(tmp_path, {"other": "one.safetensors"})
    with pytest.raises(InputError, match=r"cannot read tensor 'other' from .*one\.safetensors"):
        read(tmp_path).take("other", 2)


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "/etc/passwd", "sub/one.safetensors", "one.bin", 3, None, ["one.safetensors"]]
)
def test_an_index_names_only_safetensors_of_its_own_directory(tmp_path, tensors, shard):
    directory = tmp_path / "model"
    directory.mkdir()
    save_file(tensors, tmp_path / "outside.safetensors")
    write_index(directory, {"model.weight": shard})
    with pytest.raises(InputError, match=r"is no safetensors file of that directory"):
        read(directory)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "gone.safetensors"}}, "names the shard gone.safetensors, which is not there"),
        ({"weight_map": ["a"]}, "has no weight_map"),
        ({}, "has no weight_map"),
    ],
)
def test_a_broken_index_is_refused(tmp_path, index, message):
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(InputError, match=message):
        read(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickle_is_refused_unopened_with_how_to_convert_it(tmp_path, name):
    (tmp_path / name).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(InputError, match=rf"only a pickled checkpoint \({name}\).*safe_serialization=True"):
        read(tmp_path)
    assert not Trap.sprung


def test_a_directory_without_weights_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"holds no \*\.safetensors"):
        read(tmp_path)


class Trap:
    """Runs code when it is unpickled."""

    sprung = False

    def __reduce__(self):
        return (setattr, (Trap, "sprung", True))


def write_index(directory, weight_map) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
