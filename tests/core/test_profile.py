"""A profile round-trips through its file, and a damaged one is refused by the row or field at fault."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exeplan.core.profile import Profile, load_profile, save_profile
from exeplan.errors import InputError


@pytest.fixture
def path(profile: Profile, tmp_path: Path) -> Path:
    """A whole profile's file."""
    save_profile(profile, tmp_path / "p.json")
    return tmp_path / "p.json"


def refusal(path: Path, damage: Callable[[dict[str, Any]], object]) -> str:
    """What is said about the file after the damage."""
    body = json.loads(path.read_text())
    damage(body)
    path.write_text(json.dumps(body))
    with pytest.raises(InputError) as error:
        load_profile(path)
    message = str(error.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_a_profile_survives_its_file(profile: Profile, path: Path) -> None:
    again = load_profile(path)
    assert again.fingerprint == profile.fingerprint
    assert again.measurements == profile.measurements
    assert replace(again, model=profile.model) == profile


def test_the_file_has_one_measurement_a_line(profile: Profile, path: Path) -> None:
    lines = [line for line in path.read_text().split("\n") if '"op"' in line]
    assert len(lines) == len(profile.measurements)


def test_the_fingerprint_covers_what_decides_a_prediction(profile: Profile) -> None:
    slower = replace(profile.measurements[0], seconds=1.0)
    assert replace(profile, measurements=(slower, *profile.measurements[1:])).fingerprint != profile.fingerprint
    assert replace(profile, dtype="bfloat16").fingerprint != profile.fingerprint
    assert replace(profile, created="today").fingerprint == profile.fingerprint


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(path: Path, share: float) -> None:
    path.write_text(path.read_text()[: int(share * len(path.read_text().rstrip()))])
    with pytest.raises(InputError, match=r"p.json is not valid JSON: .* at line \d+$"):
        load_profile(path)


def test_another_file_is_refused_with_the_command_that_makes_one(path: Path) -> None:
    message = refusal(path, lambda body: body.pop("exeplan_profile"))
    assert message == f"{path} is not an exeplan profile; make one with `exeplan profile MODEL -o {path}`"


@pytest.mark.parametrize("field", ["model", "dtype", "device", "weight_bytes", "workspace_bytes", "measurements"])
def test_a_missing_field_is_named(path: Path, field: str) -> None:
    assert f"'{field}'" in refusal(path, lambda body: body.pop(field))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("weight_bytes", "20 MiB", "weight_bytes must be a positive number, found '20 MiB'"),
        ("workspace_bytes", -1, "workspace_bytes must be a positive number, found -1"),
        ("dtype", "int4", "dtype must be one of float32, bfloat16, float16, fp8, found 'int4'"),
        ("dtype", None, "dtype must be one of float32, bfloat16, float16, fp8, found None"),
        ("dtype", ["float32"], "dtype must be one of float32, bfloat16, float16, fp8, found ['float32']"),
        ("kv_dtype", {}, "kv_dtype must be one of float32, bfloat16, float16, fp8, found {}"),
        ("device", "fast", "is not a profile"),
        ("device", {"name": "x"}, "is not a profile: "),
        ("model", [], "is not a profile"),
        ("measurements", 5, "is not a profile"),
        ("measurements", [], "holds no 'attention prefill' measurement; run `exeplan profile` again"),
    ],
)
def test_a_wrong_field_is_named(path: Path, field: str, value: object, message: str) -> None:
    assert message in refusal(path, lambda body: body.update({field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("memory_bytes", "lots"),
        ("memory_bytes", float("nan")),
        ("memory_bytes", 0),
        ("copy_bytes_per_second", None),
        ("flops_per_second", float("inf")),
        ("num_threads", 0),
    ],
)
def test_a_wrong_figure_of_the_device_is_named(path: Path, field: str, value: object) -> None:
    message = refusal(path, lambda body: body["device"].update({field: value}))
    assert f"{field} must be a positive number, found {value!r}" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "magic"}, "measurement 1 has unknown op 'magic'"),
        ({"phase": "later"}, "measurement 1 has unknown op 'rest' or phase 'later'"),
        ({"seconds": 0}, "measurement 1 has seconds 0, which must be a positive number"),
        ({"seconds": -1e-6}, "measurement 1 has seconds -1e-06, which must be a positive number"),
        ({"seconds": float("nan")}, "measurement 1 has seconds nan, which must be a positive number"),
        ({"seconds": float("inf")}, "measurement 1 has seconds inf, which must be a positive number"),
        ({"seconds": 10**400}, "measurement 1 has seconds 1000"),
        ({"seconds": "1 ms"}, "measurement 1 has seconds '1 ms', which must be a positive number"),
        ({"seconds": True}, "measurement 1 has seconds True, which must be a positive number"),
        ({"num_tokens": 1.5}, "measurement 1 has a size that is not a whole number of at least 0"),
        ({"num_seqs": -1}, "measurement 1 has a size that is not a whole number of at least 0"),
        ({"num_tokens": 0}, "measurement 1 (rest) needs num_tokens of at least 1"),
        ({"colour": "red"}, "measurement 1 is malformed"),
    ],
)
def test_a_wrong_row_is_numbered(path: Path, change: dict[str, object], message: str) -> None:
    assert message in refusal(path, lambda body: body["measurements"][0].update(change))


@pytest.mark.parametrize("row", [5, "rest", None, {}, {"op": "rest", "num_tokens": 1}])
def test_a_malformed_row_is_numbered(path: Path, row: object) -> None:
    assert "measurement 3 is malformed" in refusal(path, lambda body: body["measurements"].insert(2, row))


@pytest.mark.parametrize(
    ("op", "phase"),
    [
        ("attention", "prefill"),
        ("attention", "decode"),
        ("rest", ""),
        ("embed", ""),
        ("head", ""),
        ("overhead", "prefill"),
        ("overhead", "decode"),
    ],
)
def test_a_profile_without_one_kind_of_measurement_is_refused(path: Path, op: str, phase: str) -> None:
    def without(body: dict[str, Any]) -> None:
        body["measurements"] = [m for m in body["measurements"] if (m["op"], m.get("phase", "")) != (op, phase)]

    assert f"holds no '{f'{op} {phase}'.strip()}' measurement; run `exeplan profile` again" in refusal(path, without)


@pytest.mark.parametrize(("there", "lacking"), [("prefill", "decode"), ("decode", "prefill")])
def test_products_of_one_phase_alone_are_refused(path: Path, there: str, lacking: str) -> None:
    """At each degree: there are rows of both phases at another one."""

    def of_one(body: dict[str, Any]) -> None:
        rest = [m for m in body["measurements"] if m["op"] == "rest"]
        body["measurements"] += [m | {"phase": there, "tensor_parallel_size": 2} for m in rest]

    assert f"holds no 'rest {lacking}' measurement of tensor_parallel_size 2; run" in refusal(path, of_one)


def test_an_edited_shape_is_refused(path: Path) -> None:
    message = refusal(path, lambda body: body["model"]["config"].update(hidden_size=512))
    assert message.endswith("the model's config does not match its fingerprint, so the file was edited or damaged")


def test_a_shape_without_a_size_is_refused(path: Path) -> None:
    body = json.loads(path.read_text())
    del body["model"]["config"]["hidden_size"]
    path.write_text(json.dumps(body))
    with pytest.raises(InputError, match="config of 'demo' has no hidden_size"):
        load_profile(path)
