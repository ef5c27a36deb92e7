"""The accuracy and the bytes of a plan's dtypes, and which of them a device does not support."""

from dataclasses import replace

import pytest
import torch

from exeplan.core.batch import Batch, SequenceState, num_blocks_for
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.profile import Profile, load_profile, save_profile
from exeplan.core.schedule import Schedule, single_stage
from exeplan.errors import InputError
from exeplan.kernels import native
from exeplan.kernels.select import REFERENCE
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.weights.precision import activation_dtype, cache_dtype, check_precision
from exeplan.runner.engine_process.build import build_engine, engine_setup
from exeplan.simulator.memory import kv_bytes_per_token

CPU = torch.device("cpu")
SPEC = load_model_spec("demo")


def logits(**precision: str) -> torch.Tensor:
    """Logits of two prompts and then of one more token each, on the paged path."""
    runner = ModelRunner(SPEC, num_blocks=64, paged_with=REFERENCE, **precision)
    draw = torch.Generator().manual_seed(0)
    token_ids = {name: torch.randint(SPEC.vocab_size, (n + 1,), generator=draw).tolist() for name, n in SIZES.items()}
    rows = [
        SequenceState(request_id=name, num_prompt_tokens=n, max_output_tokens=2, num_blocks=num_blocks_for(n + 1))
        for name, n in SIZES.items()
    ]
    found = [runner.forward(Batch(prefill=tuple(rows)), token_ids)]
    for row in rows:
        row.num_output_tokens = 1
    found.append(runner.forward(Batch(decode=tuple(rows)), token_ids))
    return torch.cat(found)


SIZES = {"a": 30, "b": 47}


@pytest.fixture(scope="module")
def exact() -> torch.Tensor:
    return logits(dtype="float32")


@pytest.mark.parametrize(
    ("precision", "limit"),
    [
        ({"dtype": "bfloat16"}, 2e-2),
        ({"dtype": "float32", "kv_dtype": "fp8"}, 1e-2),
        ({"dtype": "bfloat16", "kv_dtype": "fp8"}, 2e-2),
        ({"dtype": "fp8", "kv_dtype": "bfloat16"}, 0.12),
        ({"dtype": "fp8"}, 0.12),
    ],
)
def test_logits_are_near_those_of_float32(exact, precision, limit):
    """With random weights, whose sums lack the few large terms of trained ones."""
    error = (logits(**precision) - exact).norm() / exact.norm()
    assert 0 < error < limit


def test_fp8_is_activations_in_bfloat16_and_keys_in_a_byte():
    assert (activation_dtype("fp8"), cache_dtype("fp8", None)) == (torch.bfloat16, torch.float8_e4m3fn)
    assert cache_dtype("bfloat16", "fp8") == torch.float8_e4m3fn
    assert cache_dtype("bfloat16", None) == torch.bfloat16
    with pytest.raises(InputError, match="no dtype 'int4'"):
        activation_dtype("int4")


def test_weights_in_8_bits_are_half_of_bfloat16_but_for_the_vocabulary():
    half, quarter = (ModelRunner(SPEC, dtype=d, num_blocks=2, paged_with=REFERENCE) for d in ("bfloat16", "fp8"))
    tables = 2 if half.model.vocabulary.output.packed or not SPEC.tied_head else 1
    table = SPEC.vocab_size * SPEC.hidden_size * 2 * tables
    assert quarter.weight_bytes - table == pytest.approx((half.weight_bytes - table) / 2, rel=0.03)
    assert quarter.cache.num_bytes == half.cache.num_bytes // 2


def test_the_profile_has_the_bytes_of_keys_and_values(profile: Profile, tmp_path):
    in_fp8 = replace(profile, kv_dtype="fp8")
    save_profile(in_fp8, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json").cache_dtype == "fp8"
    placement = single_stage(profile.model)
    assert kv_bytes_per_token(in_fp8, placement, 0) * 4 == kv_bytes_per_token(profile, placement, 0)
    assert in_fp8.fingerprint != profile.fingerprint


def test_a_device_without_fp8_refuses_it():
    check_precision("bfloat16", None, CPU)
    with pytest.raises(InputError, match="fp8 needs a GPU, this is a CPU"):
        check_precision("bfloat16", "fp8", CPU)
    with pytest.raises(InputError, match="stored as float32 or as fp8, not as bfloat16"):
        check_precision("float32", "bfloat16", CPU)
    plan = Plan(
        model="demo",
        schedule=Schedule("orca", {"max_num_seqs": 2}),
        placement=single_stage(SPEC),
        dtype="fp8",
        kv_cache_tokens=160,
    )
    with pytest.raises(InputError, match="fp8 needs a GPU"):
        build_engine(engine_setup(plan, SPEC))


def test_an_engine_says_that_its_profile_was_measured_with_other_cpu_kernels(profile: Profile, tmp_path, capsys):
    plan = Plan(
        model="demo",
        schedule=Schedule("orca", {"max_num_seqs": 2}),
        placement=single_stage(SPEC),
        kv_cache_tokens=160,
        profile=str(tmp_path / "profile.json"),
    )
    assert engine_setup(plan, SPEC).cpu_kernels is None  # It is not there.
    here = native.description()
    for kernels, differ in (("compiled, 4 floats a vector", True), (here, False)):
        save_profile(replace(profile, versions={"cpu_kernels": kernels}), tmp_path / "profile.json")
        build_engine(engine_setup(plan, SPEC)).close()
        said = f"the plan's profile was measured with other CPU kernels ({kernels}) than run here ({here})"
        assert (said in capsys.readouterr().err) == differ
