"""Every loader of a user's file reads it or refuses it with InputError, whatever one field or several hold."""

import json
import math
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import models

from exeplan import plain_yaml
from exeplan.core.cluster import load_cluster
from exeplan.core.models.model import load_model_spec
from exeplan.core.profile import Profile, load_profile, save_profile
from exeplan.errors import InputError
from exeplan.files import read_json, read_yaml, shipped
from exeplan.planner.load_problem import read_plan
from exeplan.planner.margins.risk import load_errors
from exeplan.profiler.datasheets.datasheet import load_datasheet
from exeplan.profiler.datasheets.engine_constants import load_engine
from exeplan.runner.engine.tokenizer import Tokenizer, eos_token_ids
from exeplan.workload.files import load_workload

PLAN = {
    "model": "demo",
    "schedule": {"policy": "rra", "prefill_batch": 4, "decode_steps": 16},
    "placement": [{"devices": [0], "layers": [0, 6]}],
    "workload": "alpaca",
    "bound": {"seconds": 2.0, "metric": "mean"},
}
ERRORS = [{"predicted": {"latency": 1.9, "ttft": 0.2}, "measured": {"latency": 2.0, "ttft": 0.3}}] * 3
MODEL = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 300}
MODEL |= {"max_position_embeddings": 64, "intermediate_size": 16, "rope_scaling": {"rope_type": "linear", "factor": 2}}
LOADERS: dict[str, tuple[Callable[[], Any], Callable[[str], object]]] = {
    "plan": (lambda: PLAN, lambda path: read_plan(Path(path))),
    "cluster": (lambda: read_yaml(shipped("clusters", "a40")), load_cluster),
    "workload": (lambda: read_yaml(shipped("workloads", "S")), load_workload),
    "measured workload": (lambda: read_yaml(shipped("workloads", "azure-2023-conv")), load_workload),
    "device": (lambda: read_yaml(shipped("devices", "a40-48gb")), load_datasheet),
    "engine": (lambda: read_yaml(shipped("engines", "vllm")), load_engine),
}
_ODD = st.sampled_from(
    [None, True, 0, -1, 2**70, -(2**70), 0.5, 1e308, 1e-320, math.nan, math.inf, "", "x", "\n", "1", [], {}]
)
_ODD |= st.recursive(_ODD, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner))


@st.composite
def damage(draw: st.DrawFn, body: Any) -> Any:
    """The body with up to three of its values replaced, removed or joined by another."""
    body = deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        parent = body
        while True:
            keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(parent[key], dict | list) and draw(st.booleans()):
                parent = parent[key]
                continue
            if draw(st.integers(0, 4)):
                parent[key] = draw(_ODD)
            else:
                del parent[key]
            break
    return body


def read_or_refused(load: Callable[[str], object], path: Path) -> None:
    try:
        load(str(path))
    except InputError as error:
        assert str(error)  # noqa: PT017 (both outcomes are right)


hostile = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("kind", LOADERS)
@hostile
@given(data=st.data())
def test_a_damaged_yaml_file_is_read_or_refused(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    body, load = LOADERS[kind]
    (tmp_path / "file.yaml").write_text(plain_yaml.dump(data.draw(damage(body()))))
    read_or_refused(load, tmp_path / "file.yaml")


@hostile
@given(data=st.data())
def test_a_damaged_profile_is_read_or_refused(profile: Profile, data: st.DataObject, tmp_path: Path) -> None:
    save_profile(profile, tmp_path / "whole.json")
    body = read_json(tmp_path / "whole.json")
    body["measurements"] = body["measurements"][::9]
    (tmp_path / "file.json").write_text(json.dumps(data.draw(damage(body))))
    read_or_refused(lambda path: load_profile(Path(path)), tmp_path / "file.json")


@hostile
@given(body=damage(ERRORS))
def test_a_damaged_list_of_errors_is_read_or_refused(body: Any, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(json.dumps(body))
    read_or_refused(lambda path: load_errors(Path(path)), tmp_path / "file.json")


def _checkpoint() -> dict[str, Any]:
    """The JSON files of a model directory, by name."""
    vocab = {chr(97 + i): i for i in range(9)} | {"ab": 9}
    tokenizer = json.loads(HuggingFaceTokenizer(models.BPE(vocab, [("a", "b")])).to_str())
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return {
        "config.json": MODEL,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"eos_token": "b", "bos_token": {"content": "a"}, "chat_template": template},
        "generation_config.json": {"eos_token_id": [1, 2]},
    }


def _use(directory: str) -> None:
    spec = load_model_spec(directory)
    eos_token_ids(spec)
    tokenizer = Tokenizer.load(spec)
    tokenizer.decode(tokenizer.encode("abc"))
    tokenizer.encode_chat([{"role": "user", "content": "abc"}])


@hostile
@given(data=st.data())
def test_a_damaged_checkpoint_is_read_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    files = _checkpoint()
    name = data.draw(st.sampled_from(sorted(files)))
    for file, body in files.items():
        (tmp_path / file).write_text(json.dumps(data.draw(damage(body)) if file == name else body))
    read_or_refused(_use, tmp_path)
