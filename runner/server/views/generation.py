"""`/v1/completions` and `/v1/chat/completions`: OpenAI's generation endpoints."""

from typing import Any

from fastapi import APIRouter, Request, Response

from exeplan.runner.server.generation import generate
from exeplan.runner.server.openai.chat_request import ChatRequest
from exeplan.runner.server.openai.completion_request import CompletionRequest
from exeplan.runner.server.openai.responses import ChatChunk, ChatCompletion, Completion, CompletionChunk
from exeplan.runner.server.views.interface import Schema, Served, declared, failures, reads

router = APIRouter()


def _responses(chunk: Any) -> dict[int | str, Schema]:
    # The schema of a stream is that of each of its events.
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": declared(chunk)}
    ends = {"const": "[DONE]", "description": "the last event"}
    event = {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [data, ends]}}}
    streamed: dict[int | str, Schema] = {200: {"content": {"text/event-stream; charset=utf-8": {"schema": event}}}}
    return streamed | failures(400, 404, 408, 413, 429, 500, 503, 504)


@router.post(
    "/v1/completions",
    summary="a text that continues a prompt",
    openapi_extra=reads(declared(CompletionRequest)),
    response_model=Completion,
    responses=_responses(CompletionChunk),
)
async def completions(request: Request, service: Served) -> Response:
    return await generate(service, request, chat=False)


@router.post(
    "/v1/chat/completions",
    summary="the next message of a conversation",
    openapi_extra=reads(declared(ChatRequest)),
    response_model=ChatCompletion,
    responses=_responses(ChatChunk),
)
async def chat_completions(request: Request, service: Served) -> Response:
    return await generate(service, request, chat=True)
