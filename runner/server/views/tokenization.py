"""`/tokenize`, `/detokenize`, `/tokenizer_info`: a prompt, or a conversation, as token ids and back; vLLM's paths and
fields."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from typing_extensions import TypedDict

from exeplan.runner.server.network.clients import client_of
from exeplan.runner.server.network.connection import read_body
from exeplan.runner.server.openai.tokenize_request import DetokenizeRequest, TokenizeRequest
from exeplan.runner.server.views.interface import Served, declared, failures, reads

router = APIRouter()
_FAILURES = failures(400, 404, 408, 413, 429, 503)


class Tokens(TypedDict):
    count: int
    max_model_len: int
    """Tokens of a prompt and its output."""
    tokens: list[int]
    token_strs: list[str] | None
    """The text of each token, where `return_token_strs` asks for it."""


class Text(TypedDict):
    prompt: str


class TokenizerInfo(TypedDict):
    """What a client must know to ask for tokens by `/tokenize` only, as lm-eval does; null for what a model lacks."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    model_max_length: int
    """Tokens of a prompt and its output."""


@router.post(
    "/tokenize",
    summary="token ids of a prompt or of messages",
    openapi_extra=reads(declared(TokenizeRequest)),
    response_model=Tokens,
    responses=_FAILURES,
)
async def tokenize(request: Request, service: Served) -> Response:
    client = client_of(request)
    with service.clients.reading(client):
        try:
            found = await service.tokenize(await read_body(request), client)
        except ClientDisconnect:
            return Response()
    body: Tokens = {
        "count": len(found.token_ids),
        "max_model_len": service.max_context,
        "tokens": found.token_ids,
        "token_strs": found.texts,
    }
    return JSONResponse(body)


@router.post(
    "/detokenize",
    summary="the text of token ids",
    openapi_extra=reads(declared(DetokenizeRequest)),
    response_model=Text,
    responses=_FAILURES,
)
async def detokenize(request: Request, service: Served) -> Response:
    client = client_of(request)
    with service.clients.reading(client):
        try:
            found = await service.detokenize(await read_body(request), client)
        except ClientDisconnect:
            return Response()
    body: Text = {"prompt": found.text}
    return JSONResponse(body)


@router.get(
    "/tokenizer_info",
    summary="special tokens and chat template of the model",
    response_model=TokenizerInfo,
    responses=failures(503),
)
async def tokenizer_info(service: Served) -> JSONResponse:
    service.check_loaded()
    special, template = service.tokenizer.special_tokens, service.tokenizer.chat_template
    body: TokenizerInfo = {
        "bos_token": special.get("bos_token"),
        "eos_token": special.get("eos_token"),
        "pad_token": special.get("pad_token"),
        "unk_token": special.get("unk_token"),
        "chat_template": template.source if template else None,
        "model_max_length": service.max_context,
    }
    return JSONResponse(body)
