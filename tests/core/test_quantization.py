"""What a config says of its quantized weights is read, or refused in one sentence that names the field."""

import json
from pathlib import Path
from typing import Any

import pytest

from exeplan import api
from exeplan.core.models.model import load_model_spec, model_spec
from exeplan.core.models.quantization import Quantization, quantization_of
from exeplan.errors import InputError

from .test_model_config import LLAMA

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}


def compressed(form: str, weights: dict[str, Any], **change: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, **change}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMM"}, "awq, 4 bits, groups of 64"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128, "desc_act": True}, "gptq, 8 bits, groups of 128"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "gptq, 4 bits"),
        (compressed("pack-quantized", INT4), "compressed-tensors, 4 bits, groups of 128"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8, 8 bits, blocks of 128 x 128"),
        ({"quant_method": "mxfp4"}, "mxfp4, 4 bits, groups of 32"),
    ],
)
def test_what_is_read(config: dict[str, Any], text: str) -> None:
    assert str(quantization_of(config, "tiny")) == text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "awq", "bits": 3, "group_size": 128}, "bits=3 are not read, only 4"),
        ({"quant_method": "awq", "bits": 4, "group_size": 100}, "group_size=100 are not read, only 32, 64, 128 and -1"),
        ({"quant_method": "awq", "bits": 4}, "group_size=None are not read"),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"},
            "version=gemv are not read, only gemm",
        ),
        ({"quant_method": "gptq", "bits": 2, "group_size": 128}, "bits=2 are not read, only 4 and 8"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
            "checkpoint_format=marlin are not read, only gptq and gptq_v2",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:.*": {"bits": 8}}},
            r"only rules that leave layers out \(-:\)",
        ),
        (compressed("marlin-24", INT4), "format='marlin-24' are not read"),
        (compressed("pack-quantized", INT4, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme=.* only none"),
        (compressed("pack-quantized", INT4, config_groups={}), "only one group with its weights"),
        (compressed("int-quantized", {**INT4, "num_bits": 4}), "num_bits=4 are not read, only 4 .packed. and 8"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt=e5m2 are not read, only e4m3"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "only two sizes such as"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "modules_to_not_convert": "x"}, "only a list of names"),
    ],
)
def test_what_is_not_read_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"config of 'tiny': quantized weights with .*{message}"):
        model_spec({**LLAMA, "quantization_config": config}, name="tiny")


@pytest.mark.parametrize(
    ("file", "body", "text"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False}, "gptq, 4 bits, groups of 128"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 64, "version": "GEMM"}, "awq, 4 bits, groups of 64"),
    ],
)
def test_files_next_to_a_config_are_read(tmp_path: Path, file: str, body: dict[str, Any], text: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / file).write_text(json.dumps(body))
    spec = load_model_spec(str(tmp_path))
    assert str(spec.quantization) == text
    assert model_spec(spec.config, name="again").quantization == spec.quantization


def test_layers_that_are_left_out_are_known_by_name_and_by_pattern() -> None:
    how = Quantization(method="awq", layout="awq", bits=4, skipped=("lm_head", "re:.*layers\\.1\\..*", "re:("))
    assert how.skips("lm_head")
    assert how.skips("model.layers.1.mlp.up_proj")
    assert not how.skips("model.layers.11.mlp.up_proj")


def test_products_that_no_datasheet_has_are_measured() -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 64}
    spec = model_spec({**LLAMA, "quantization_config": config}, name="tiny")
    with pytest.raises(
        InputError, match=r"'tiny' is quantized \(awq, 4 bits, groups of 64\), whose products are measu"
    ):
        api.datasheet_profile(spec, "h100-80gb")
