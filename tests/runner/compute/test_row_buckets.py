"""A pass is padded to a row bucket, so that few row counts occur; results do not change."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exeplan.core.batch import Batch, SequenceState, num_blocks_for
from exeplan.core.models.model import load_model_spec
from exeplan.kernels import native
from exeplan.kernels.products.linear import compiles_by_rows, prepacks, row_bucket
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.passes.row_buckets import RowBucket


@given(rows=st.integers(1, 1 << 16))
def test_padding_is_small(rows):
    added = row_bucket(rows) - rows
    assert 0 <= added <= max(3, min(15, rows / 16))
    assert row_bucket(row_bucket(rows)) == row_bucket(rows)


def test_there_are_few_buckets():
    assert [row_bucket(rows) for rows in range(4, 33)] == [*range(4, 33)]
    assert len({row_bucket(rows) for rows in range(1, 257)}) == 29 + 3 * 16
    assert all(few <= more for few, more in pairwise(map(row_bucket, range(1, 600))))


class _Counting:
    """A layer that records its row counts."""

    def __init__(self, layer, seen: set[int]) -> None:
        self._layer, self._seen = layer, seen

    def __call__(self, hidden_NE, angles, attend, *wanted_R):
        self._seen.add(len(hidden_NE))
        return self._layer(hidden_NE, angles, attend, *wanted_R)


@pytest.mark.skipif(
    not prepacks(torch.device("cpu"), torch.float32), reason="this build of torch makes no code by the number of rows"
)
def test_layers_get_buckets_and_logits_do_not_change(runner, monkeypatch):
    lengths = [*range(1, 70, 3), 130, 259]
    logits = {length: _logits(runner, length, set()) for length in lengths}
    seen: set[int] = set()
    monkeypatch.setattr(RowBucket, "of", classmethod(lambda cls, num_rows: cls(num_rows, 0)))
    for length in lengths:
        torch.testing.assert_close(_logits(runner, length, seen), logits[length], rtol=1e-3, atol=1e-4)
    assert seen == set(lengths)  # As they come, without rounding.
    monkeypatch.undo()
    seen.clear()
    for length in lengths:
        _logits(runner, length, seen)
    assert seen == {row_bucket(length) for length in lengths}


def test_products_that_are_not_compiled_by_the_number_of_rows_get_them_as_they_come():
    if compiles_by_rows(torch.device("cpu"), torch.float32):
        pytest.skip("products are oneDNN's here")
    seen: set[int] = set()
    _logits(ModelRunner(load_model_spec("demo"), num_blocks=32, dummy_weights=True), 65, seen)
    assert seen == {65}


@pytest.fixture(scope="module")
def runner():
    """With oneDNN's products."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "multiplies", lambda: False)
        yield ModelRunner(load_model_spec("demo"), num_blocks=32, dummy_weights=True)


def _logits(runner: ModelRunner, num_tokens: int, seen: set[int]) -> torch.Tensor:
    """The logits of a prompt; adds the layers' row counts to `seen`."""
    layers = runner.model.layers
    row = SequenceState(request_id="a", num_prompt_tokens=num_tokens, max_output_tokens=1)
    row.num_blocks = num_blocks_for(num_tokens)
    runner.model.layers = [_Counting(layer, seen) for layer in layers]
    try:
        return runner.forward(Batch(prefill=(row,)), {"a": [token % 97 for token in range(num_tokens)]})
    finally:
        runner.model.layers = layers
        runner.free("a")
