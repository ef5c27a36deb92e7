"""The benchmark of peers says which run failed or was left out, and why, in what it prints and in its record."""

import sys
from types import SimpleNamespace

import pytest

from benchmarks.engine import throughput, throughput_peers
from benchmarks.lib import record


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the benchmark with engines that answer as given, and returns the record's body."""

    def run(answers, *options):
        found = {}

        def measure(engine, python, folder, workload):
            answer = next(answers[engine])
            if isinstance(answer, str):
                raise throughput.PeerError(answer)
            return {"rate": answer, "tokens": [[1, 2]]}

        monkeypatch.setattr(throughput, "_measure", measure)
        monkeypatch.setattr(throughput, "make_checkpoint", lambda folder, shape: None)
        monkeypatch.setattr(record, "write_record", lambda name, body: found.update(body) or tmp_path / name)
        monkeypatch.setattr(sys, "argv", ["throughput", "--workloads", "W1", "--repeats", "2", *options])
        throughput.main()
        return found

    return run


def test_a_run_that_failed_is_named_with_its_reason(run, capsys):
    found = run({"exeplan": iter([2.0, 2.0]), "generate": iter([1.0, "no memory"])}, "--engines", "exeplan", "generate")
    sentence = "generate failed in run 2 of 2 of W1: no memory"
    assert found["missing"] == [sentence]
    assert found["rates"]["W1"] == {"exeplan": [2.0, 2.0], "generate": [1.0]}
    assert capsys.readouterr().out.count(sentence) == 2  # When it happens, and below the table.


def test_an_engine_without_an_environment_is_named(run, tmp_path):
    found = run({"exeplan": iter([2.0, 2.0])}, "--engines", "exeplan", "vllm", "--peers", str(tmp_path))
    makes = "benchmarks/engine/install_peers.sh FOLDER vllm makes one"
    assert found["missing"] == [f"vllm is left out: no environment; {makes}"]


def test_a_request_that_failed_in_continuous_batching_ends_the_run_with_its_error():
    failed = SimpleNamespace(request_id="a", error="no psutil", is_finished=lambda: True, generated_tokens=[])
    manager = SimpleNamespace(get_result=lambda timeout: failed)
    with pytest.raises(RuntimeError, match="failed: no psutil"):
        throughput_peers._collect(manager, ["a"])
