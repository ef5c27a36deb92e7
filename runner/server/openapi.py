"""`/openapi.json`: what the server accepts and answers, as OpenAPI 3.1, from the very limits that are checked.

Source: https://spec.openapis.org/oas/v3.1.0. What no schema can say, that some fields are taken only together and
that prompt and output must fit the context, is said in words; such requests get 400 as well.
"""

from collections.abc import Mapping
from typing import Any

from exeplan.runner.compute.sampling import (
    FLOAT_LIMITS,
    INT_LIMITS,
    MAX_BIASES,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
)
from exeplan.runner.server.connection import OPEN_PATHS
from exeplan.runner.server.protocol import (
    HARMLESS,
    LABELS,
    MAX_CHOICES,
    MAX_DEADLINE,
    MAX_LOGPROBS,
    MAX_PROMPTS,
    MAX_WEIGHT,
)
from exeplan.version import __version__

Schema = dict[str, Any]
_ERRORS = {
    400: "what is asked for cannot be done; the message names field, value and limit",
    401: "a valid key is needed",
    403: "not allowed here",
    404: "no such thing",
    405: "no such method",
    408: "the request did not come in time, or had not begun by its own deadline",
    409: "nothing to do that to",
    413: "the body is too large",
    429: "the queue is full, or the request would come late; Retry-After says when to try again",
    431: "the header is too large",
    500: "a fault of the server",
    503: "the server is loading the model, starting workers again, or going; Retry-After says when to try again",
    504: "not done in time",
}
_GENERATION_ERRORS = (400, 401, 403, 404, 408, 413, 429, 431, 500, 503, 504)
_OBJECT = {"type": "object"}
_LOADING = {"stage": {"type": "string"}, "share": {"type": "number", "minimum": 0, "maximum": 1}}
"""What is loaded or warmed up, and how much of it is done; only while that is so."""


def describe(*, model: str, vocab_size: int, keyed: bool) -> Schema:
    """The description of a server of this model; `keyed` says whether it asks for a key."""
    paths = {
        "/v1/completions": {"post": _generation("CompletionRequest", "a text that goes on from a prompt")},
        "/v1/chat/completions": {"post": _generation("ChatRequest", "an answer in a conversation")},
        "/v1/models": {"get": _models()},
        "/v1/models/{name}": {"get": _model(model)},
        "/plan": {"get": _view("the active plan, predictions and observations", _OBJECT), "post": _control()},
        "/live": {"get": _view("what the page at / shows", _OBJECT)},
        "/metrics": {
            "get": _view("for Prometheus", {"type": "string"}, kind="text/plain; version=0.0.4; charset=utf-8")
        },
        "/health": {"get": _probe("alive", {})},
        "/ready": {"get": _probe("answering", _LOADING)},
        "/openapi.json": {"get": _view("this description", _OBJECT)},
        "/": {"get": _view("a page that shows it all live", {"type": "string"}, kind="text/html; charset=utf-8")},
    }
    components: Schema = {"schemas": _schemas(model, vocab_size)}
    if keyed:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, methods in paths.items():
            for operation in methods.values():
                operation["security"] = [] if path in OPEN_PATHS else [{"key": []}]
    info = {"title": "exeplan", "version": __version__, "description": __doc__.split("\n\n")[1]}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _schemas(model: str, vocab_size: int) -> Schema:
    return {
        "Error": _error(),
        "CompletionRequest": _body(_completion(vocab_size), model, vocab_size, required="prompt"),
        "ChatRequest": _body(_chat(), model, vocab_size, required="messages"),
        "Completion": _answer("text_completion", {"text": {"type": "string"}}),
        "Chat": _answer("chat.completion", {"message": _OBJECT}),
    }


def _body(own: Schema, model: str, vocab_size: int, *, required: str) -> Schema:
    common = {
        "model": {"enum": [model, None]},
        "n": _integer(1, MAX_CHOICES),
        "stream": {"type": ["boolean", "null"]},
        "deadline": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": MAX_DEADLINE},
        "weight": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": MAX_WEIGHT},
        "stream_options": {
            "description": "only with stream=true",
            "type": ["object", "null"],
            "properties": {name: {"type": "boolean"} for name in ("include_usage", "include_obfuscation")},
            "additionalProperties": False,
        },
    }
    harmless = {name: {"enum": [None, *values]} for name, values in HARMLESS.items()}
    labels = {name: {"type": ["string" if kind is str else "object", "null"]} for name, kind in LABELS.items()}
    properties = {**common, **_sampling(vocab_size), **own, **harmless, **labels}
    return {"type": "object", "required": [required], "properties": properties, "additionalProperties": False}


def _sampling(vocab_size: int) -> Schema:
    whole = {name: _integer(low, high) for name, (low, high) in INT_LIMITS.items() if name != "logprobs"}
    real = {
        name: {"type": ["number", "null"], "minimum": low, "maximum": high}
        for name, (low, high) in FLOAT_LIMITS.items()
    }
    stop = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
    token = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    bias = {"type": "number", "minimum": -100, "maximum": 100}
    return {
        **whole,
        **real,
        "ignore_eos": {"type": ["boolean", "null"]},
        "stop": {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": MAX_STOPS}, {"type": "null"}]},
        "stop_token_ids": {"type": ["array", "null"], "items": token, "maxItems": MAX_STOP_IDS},
        "logit_bias": {
            "type": ["object", "null"],
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": bias,
            "maxProperties": MAX_BIASES,
        },
    }


def _completion(vocab_size: int) -> Schema:
    text = {"type": "string", "minLength": 1}
    ids = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}}
    many = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
    return {
        "prompt": {"anyOf": [text, ids, {**many, "items": text}, {**many, "items": ids}]},
        "echo": {"description": "not with logprobs", "type": ["boolean", "null"]},
        "logprobs": _integer(0, MAX_LOGPROBS),
    }


def _chat() -> Schema:
    part = {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "additionalProperties": False,
    }
    message = {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant"]},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]},
            "name": {"type": ["string", "null"]},
        },
        "additionalProperties": False,
    }
    return {
        "messages": {"type": "array", "minItems": 1, "maxItems": 4096, "items": message},
        "logprobs": {"type": ["boolean", "null"]},
        "top_logprobs": {**_integer(0, MAX_LOGPROBS), "description": "only with logprobs=true"},
        "max_completion_tokens": {**_integer(*INT_LIMITS["max_tokens"]), "description": "instead of max_tokens"},
    }


def _integer(low: float, high: float) -> Schema:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


def _answer(kind: str, content: Mapping[str, Any]) -> Schema:
    choice = {
        "type": "object",
        "required": ["index", "finish_reason", *content],
        "properties": {"index": {"type": "integer"}, "finish_reason": {"enum": ["stop", "length"]}, **content},
    }
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    usage = {
        "type": "object",
        "required": [*counts],
        "properties": {c: {"type": "integer", "minimum": 0} for c in counts},
    }
    names = ("id", "object", "created", "model", "choices", "usage", "timing")
    properties = {
        "object": {"const": kind},
        "choices": {"type": "array", "minItems": 1, "items": choice},
        "usage": usage,
        "timing": {"type": "object", "additionalProperties": {"type": "number"}},
    }
    return {"type": "object", "required": [*names], "properties": properties}


def _error() -> Schema:
    text = {"type": "string"}
    fields = {
        "message": text,
        "type": text,
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
    }
    inner = {"type": "object", "required": [*fields], "properties": fields, "additionalProperties": False}
    return {"type": "object", "required": ["error"], "properties": {"error": inner}}


def _content(schema: Schema, kind: str = "application/json") -> Schema:
    return {"content": {kind: {"schema": schema}}}


def _failures(*statuses: int) -> Schema:
    error = _content({"$ref": "#/components/schemas/Error"})
    return {str(status): {"description": _ERRORS[status], **error} for status in statuses}


def _generation(name: str, summary: str) -> Schema:
    whole = {"$ref": f"#/components/schemas/{name.removesuffix('Request')}"}
    # Of a stream, the schema is that of each event; a chunk is in its data, the last one is [DONE].
    event = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
    kinds = {"application/json": {"schema": whole}, "text/event-stream; charset=utf-8": {"schema": event}}
    body = _content({"$ref": f"#/components/schemas/{name}"})
    answers = {"200": {"description": summary, "content": kinds}, **_failures(*_GENERATION_ERRORS)}
    return {"summary": summary, "requestBody": {"required": True, **body}, "responses": answers}


def _view(summary: str, schema: Schema, *, kind: str = "application/json") -> Schema:
    answers = {"200": {"description": summary, **_content(schema, kind)}, **_failures(401, 403, 431)}
    return {"summary": summary, "responses": answers}


def _models() -> Schema:
    view = _view("the models, of which there is one", _OBJECT)
    return {**view, "responses": {**view["responses"], **_failures(503)}}


def _model(model: str) -> Schema:
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    view = _view(f"one model, such as {model}", _OBJECT)
    return {**view, "parameters": [name], "responses": {**view["responses"], **_failures(404, 405, 503)}}


def _probe(summary: str, meanwhile: Schema) -> Schema:
    status: Schema = {"status": {"type": "string"}}
    good, bad = (
        _content({"type": "object", "required": ["status"], "properties": properties})
        for properties in (status, {**status, **meanwhile})
    )
    answers = {"200": {"description": summary, **good}, "503": {"description": f"not {summary}", **bad}}
    return {"summary": summary, "responses": {**answers, **_failures(403, 431)}}


def _control() -> Schema:
    summary = (
        "another plan: none to read the file again, a plan, {accept: true} or {veto: why}; needs a server with a key"
    )
    view = _view(summary, _OBJECT)
    answers = {**view["responses"], **_failures(400, 408, 409, 413, 503)}
    return {"summary": summary, "requestBody": {"required": False, **_content(_OBJECT)}, "responses": answers}
