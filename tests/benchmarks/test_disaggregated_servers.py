"""A whole disaggregated run is replayed on as many servers as it had, and its errors are predicted over measured."""

import pytest

from benchmarks.silicon.disaggregated import DecodeRun
from benchmarks.silicon.servers import _cost, judged
from exeplan.core.schedule import Sharding, num_servers


def test_a_run_has_one_server_that_prefills_and_those_that_decode_on_two_hosts_each() -> None:
    cost = _cost(2)
    assert num_servers(cost.placement) == (1, 2)
    assert [stage.num_devices for stage in cost.placement] == [16, 16, 16]
    assert cost.cluster
    assert cost.cluster.num_nodes == 6


def test_errors_are_of_what_is_replayed() -> None:
    run = DecodeRun(engine="sglang", sharding=Sharding(16), workers=2, lengths=(64, 16), clients=2, ttft=1.0, tpot=0.01)
    row = judged(run)
    assert row["error %"] == pytest.approx(100 * (float(str(row["predicted"])) / 1000 - 1), abs=0.2)
    assert row["TPOT error %"] == pytest.approx(100 * (float(str(row["TPOT predicted"])) / 10 - 1), abs=1.0)
    assert row["servers"] == "1P2D"
