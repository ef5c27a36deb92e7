"""A report says what a plan assumes of memory where its profile does not tell, and how sure its times are."""

import json
from pathlib import Path

import pytest

from exeplan.cli import main
from exeplan.core.profile import UNSURE

ASSUMED = "the profile has no runtime_bytes: 1.50 GiB of workspace are assumed for all passes and placements"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a profile of a GPU, the same as an older exeplan wrote it, and the same with an engine's constants."""
    folder = tmp_path_factory.mktemp("profiles")
    for name, more in (("new", []), ("vllm", ["--engine", "vllm"])):
        made = ["profile", "llama-50m", "--datasheet", "a100-40gb", *more, "-o", str(folder / f"{name}.json")]
        assert main(made) == 0
    body = json.loads((folder / "new.json").read_text())
    assert body.pop("runtime_bytes") == 1_500_000_000
    (folder / "old.json").write_text(json.dumps({**body, "workspace_bytes": 3 << 29}))
    return folder


@pytest.mark.parametrize(("profile", "assumes"), [("new", False), ("old", True), ("vllm", False)])
def test_a_gpus_profile_without_runtime_bytes_is_planned_with_a_sentence(
    folder: Path, profile: str, assumes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--workload", "fixed:in=64;out=8", "--latency-bound", "60s", "--policy", "orca", "--max-num-seqs", "4"]
    assert (
        main(["optimize", "--profile", str(folder / f"{profile}.json"), *asked, "-o", str(folder / "plan.yaml")]) == 0
    )
    assert (ASSUMED in " ".join(capsys.readouterr().out.split())) is assumes


@pytest.mark.parametrize(("error", "said"), [(0.02, "the profile's times are sure to +-2.0%"), (0.0, UNSURE)])
def test_a_profile_of_one_burst_is_not_called_sure(
    folder: Path, error: float, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    body = json.loads((folder / "new.json").read_text())
    one = {"kind": "decode", "num_seqs": 1, "num_tokens": 128, "num_layers": 1, "seconds": 0.005, "error": 0.02}
    watched = {"reference_passes": [one], "speed_spread": 0.1, "calibration_error": error}
    (folder / "watched.json").write_text(json.dumps({**body, **watched}))
    asked = ["--workload", "fixed:in=64;out=8", "--latency-bound", "60s", "--policy", "orca", "--max-num-seqs", "4"]
    assert main(["optimize", "--profile", str(folder / "watched.json"), *asked, "-o", str(folder / "plan.yaml")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"{said}; " in told.replace(" (one standard error)", "")
    assert "speed moved by +-10% meanwhile, and predictions are at its geometric mean" in told


def test_programs_are_told_the_remarks_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--workload", "fixed:in=64;out=8", "--latency-bound", "60s", "--policy", "orca", "--max-num-seqs", "4"]
    found = []
    for profile in ("new", "old"):
        assert main(["optimize", "--profile", str(folder / f"{profile}.json"), *asked, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["remarks"])
    assert found[0] == []
    assert [remark.startswith(ASSUMED) for remark in found[1]] == [True]


@pytest.mark.parametrize(
    ("source", "saving", "said"),
    [("measured", 0.0, True), ("measured", 0.8, False), ("measured with vllm", 0.0, False)],
)
def test_a_profile_of_an_older_engine_is_told(
    folder: Path, source: str, saving: float, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    body = json.loads((folder / "new.json").read_text())
    (folder / "made.json").write_text(json.dumps({**body, "source": source, "last_layer_saving": saving}))
    asked = ["--workload", "fixed:in=64;out=8", "--latency-bound", "60s", "--policy", "orca", "--max-num-seqs", "4"]
    assert main(["optimize", "--profile", str(folder / "made.json"), *asked, "-o", str(folder / "plan.yaml")]) == 0
    assert ("the profile has no last_layer_saving" in capsys.readouterr().out) is said
