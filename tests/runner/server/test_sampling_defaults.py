"""Fields of sampling that a request leaves out are those of the model's generation_config.json."""

import json
import shutil
from typing import Any

import pytest

from exeplan.core.models.model import load_model_spec
from exeplan.errors import InputError
from exeplan.runner.server.openai.chat_request import ChatRequest
from exeplan.runner.server.openai.completion_request import CompletionRequest
from exeplan.runner.server.openai.generation_request import parse
from exeplan.runner.server.options import ServeOptions
from exeplan.runner.server.sampling_defaults import sampling_defaults

STATED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.05}


@pytest.fixture
def model(checkpoint, tmp_path):
    """A directory with the model, to write its generation_config.json in."""
    return shutil.copytree(checkpoint, tmp_path / "model")


def defaults_of(model, stated: dict[str, Any]) -> dict[str, float]:
    (model / "generation_config.json").write_text(json.dumps(stated))
    return sampling_defaults(load_model_spec(str(model)))


def test_the_fields_of_sampling_are_taken_and_no_others(model):
    more = {"do_sample": True, "eos_token_id": [1], "max_new_tokens": 5, "num_beams": 4, "transformers_version": "5"}
    assert defaults_of(model, {**STATED, **more}) == STATED
    assert defaults_of(model, {"temperature": None, "top_p": 0.8}) == {"top_p": 0.8}
    assert defaults_of(model, {}) == {}


def test_without_the_file_there_are_none(checkpoint):
    assert sampling_defaults(load_model_spec(str(checkpoint))) == {}
    assert sampling_defaults(load_model_spec("demo")) == {}


def test_a_value_that_no_client_may_send_is_left_out_with_a_sentence(model, caplog):
    assert defaults_of(model, {"temperature": 7.5, "top_k": "20", "top_p": 0.8}) == {"top_p": 0.8}
    assert [record.getMessage() for record in caplog.records] == [
        "generation_config.json is not followed here: temperature must be between 0.0 and 2.0, found 7.5",
        "generation_config.json is not followed here: top_k must be an integer between -1 and 2147483647, found '20'",
    ]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": "a"}),
        (ChatRequest, {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_what_a_client_says_wins_and_null_says_nothing(kind, body):
    said = {"temperature": 1.0, "top_k": 0, "top_p": None}
    _, sampling = parse(kind, json.dumps({**body, **said}).encode(), STATED)
    found = {name: getattr(sampling, name) for name in STATED}
    assert found == {**STATED, "temperature": 1.0, "top_k": 0}


def test_a_server_follows_the_file_and_says_so(model, launch, tmp_path):
    (model / "generation_config.json").write_text(json.dumps({"top_k": 1, "top_p": 0.9}))
    log = tmp_path / "log"
    with launch(directory=model, log=log) as server:
        assert output(server) == output(server) == output(server, temperature=0)
        assert output(server, top_k=0, top_p=1.0) != output(server)
    line = "sampling defaults of generation_config.json, for fields that a request leaves out: top_k 1, top_p 0.9"
    assert line in log.read_text()


def test_a_server_that_is_told_not_to_does_not(model, launch):
    (model / "generation_config.json").write_text(json.dumps({"top_k": 1}))
    with launch(directory=model, generation_config="none") as server:
        assert output(server) != output(server, temperature=0)


def output(server, **fields: Any) -> str:
    """A text of random tokens has many."""
    return json.loads(server.complete({"prompt": "the quick", "max_tokens": 40, **fields}).text)["choices"][0]["text"]


def test_another_mode_is_refused():
    with pytest.raises(InputError, match="--generation-config must be one of auto, none, found 'vllm'"):
        ServeOptions(generation_config="vllm")
