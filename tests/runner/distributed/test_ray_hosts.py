"""A plan on a Ray cluster of two hosts gives the tokens of one host, where `ray_hosts.sh` can run."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("ray_hosts.sh")
_SKIPPED = 77


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'exeplan[ray]'")
def test_two_network_namespaces_run_one_plan_and_one_of_them_may_be_cut_off():
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run([SCRIPT], env=environment, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode == _SKIPPED:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "replicas: the tokens of one host, one of two being cut off\n" in done.stdout
