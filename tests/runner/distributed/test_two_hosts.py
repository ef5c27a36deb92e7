"""A plan over two hosts that torchrun started gives the tokens of one host, where `two_hosts.sh` can run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("two_hosts.sh")
_SKIPPED = 77


def test_two_network_namespaces_run_one_plan():
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run([SCRIPT], env=environment, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode == _SKIPPED:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "two_hosts: across: the tokens of one host\n" in done.stdout
