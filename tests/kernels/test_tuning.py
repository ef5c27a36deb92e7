"""The fastest configuration is measured once and stored, also for later processes."""

import pytest
import torch

from exeplan.kernels.tuning import AttentionConfigs, Config, TuningTable, _seconds, best_config, untimed

CONFIGS = tuple(Config(columns=columns) for columns in (16, 32, 64))


def unexpected(config: Config) -> float:
    raise AssertionError(f"timed {config} again")


def test_the_fastest_is_remembered(tmp_path):
    path = tmp_path / "folder" / "kernels.json"
    times = dict(zip(CONFIGS, (3.0, 1.0, 2.0), strict=True))
    table = TuningTable(path)
    assert table.best("key", CONFIGS, times.__getitem__) == CONFIGS[1]
    assert table.best("key", CONFIGS, unexpected) == CONFIGS[1]
    assert TuningTable(path).best("key", CONFIGS, unexpected) == CONFIGS[1]


def test_a_configuration_that_is_no_longer_listed_is_measured_anew(tmp_path):
    path = tmp_path / "kernels.json"
    TuningTable(path).best("key", CONFIGS[:1], lambda _: 1.0)
    assert TuningTable(path).best("key", CONFIGS[1:], lambda config: config.columns) == CONFIGS[1]


def test_a_configuration_that_cannot_run_is_skipped(tmp_path):
    table = TuningTable(tmp_path / "kernels.json")
    assert table.best("key", CONFIGS, lambda config: None if config.columns < 64 else 1.0) == CONFIGS[2]


def test_without_timing_the_first_is_taken_and_not_stored(tmp_path):
    table = TuningTable(tmp_path / "kernels.json")
    assert table.best("key", CONFIGS, lambda _: None) == CONFIGS[0]
    assert not table.path.exists()
    assert table.best("key", CONFIGS, lambda config: -config.columns) == CONFIGS[2]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": {"columns": 16}}', '{"key": 3}'])
def test_a_damaged_file_is_an_empty_one(text, tmp_path):
    path = tmp_path / "kernels.json"
    path.write_text(text)
    assert TuningTable(path).best("key", CONFIGS, lambda config: -config.columns) == CONFIGS[2]


def test_untimed_launches_nothing():
    with untimed(), untimed():
        assert _seconds(unexpected, CONFIGS[0]) is None


def test_the_cpu_times_nothing():
    assert best_config("kernel", (), CONFIGS, unexpected, torch.device("cpu")) == CONFIGS[0]


def test_configurations_depend_on_dtype_and_head_size():
    configs = AttentionConfigs(usual=CONFIGS[:1], wide=CONFIGS[1:2], exact=CONFIGS[2:])
    of = {(torch.bfloat16, 80): "usual", (torch.float16, 256): "wide", (torch.float32, 64): "exact"}
    assert {kind: configs.of(*kind) for kind in of} == {kind: getattr(configs, name) for kind, name in of.items()}
