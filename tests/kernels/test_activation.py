"""Every activation, gated and plain, equals torch's."""

import pytest
import torch

from exeplan.kernels.activation import (
    KINDS,
    gated_activation,
    gated_activation_reference,
    plain_activation,
    plain_activation_reference,
)

from .paged_cache import TOLERANCES

# numpy warns where a GPU gives infinity.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "width"), [(0, 4), (1, 1), (3, 50), (2, 1025)])
def test_equals_the_reference(tokens, width, kind, dtype, device):
    wide = (torch.randn(tokens, 2 * width + 3, device=device) * 3).to(dtype)  # Rows that lie apart.
    gate_up = wide[:, : 2 * width]
    found, expected = gated_activation(gate_up, kind), gated_activation_reference(gate_up, kind)
    torch.testing.assert_close(found, expected, **TOLERANCES[dtype])
    found, expected = plain_activation(gate_up, kind), plain_activation_reference(gate_up, kind)
    torch.testing.assert_close(found, expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_nan_and_large_values_do_not_overflow(kind, device):
    x = torch.tensor([[torch.nan, 1e4, -1e4, torch.inf]], device=device)
    found = plain_activation(x, kind)[0].tolist()
    assert found[0] != found[0]
    assert found[1:] == [1e4, 0.0, torch.inf]
