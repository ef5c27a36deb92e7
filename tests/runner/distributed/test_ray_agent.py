"""A node's agent finds the model of the plan there, or says what is missing."""

import json
import os
import subprocess
import sys

import pytest

from exeplan.core.models.model import load_model_spec
from exeplan.errors import InputError
from exeplan.runner.distributed.ray_agent import ModelOfPlan, _find


def test_a_model_without_weights_is_nowhere():
    assert _find(ModelOfPlan(name="demo", directory=None, fingerprint="any")) is None


def test_a_directory_that_the_node_lacks_is_named(tmp_path):
    with pytest.raises(InputError, match=f"has no model at {tmp_path}/model; copy it there, or mount it"):
        _find(ModelOfPlan(name="model", directory=f"{tmp_path}/model", fingerprint="any"))


def test_another_model_in_the_same_directory_is_refused(tmp_path):
    demo = load_model_spec("demo")
    (tmp_path / "config.json").write_text(json.dumps(dict(demo.config)))
    mine = ModelOfPlan(name="model", directory=str(tmp_path), fingerprint=demo.fingerprint)
    assert _find(mine) == str(tmp_path)
    with pytest.raises(InputError, match=f"has a model of other sizes at {tmp_path}"):
        _find(ModelOfPlan(name="model", directory=str(tmp_path), fingerprint="another"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may lower a niceness")
def test_an_agent_has_the_niceness_of_its_raylet():
    code = (
        "import os; from exeplan.runner.distributed.ray_agent import _take_niceness_of; os.nice(3); "
        "_take_niceness_of(os.getppid()); print(os.nice(0))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) == os.nice(0)
