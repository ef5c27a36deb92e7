"""`/v1/models`: the model that is served, as OpenAI lists models."""

from typing import Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from typing_extensions import TypedDict

from exeplan.runner.server.openai.errors import unknown_model
from exeplan.runner.server.service import Service
from exeplan.runner.server.views.interface import Served, failures

router = APIRouter()


class Permission(TypedDict):
    """What may be done with the model, in the words that OpenAI's API once had; clients of vLLM read it."""

    id: str
    object: Literal["model_permission"]
    created: int
    allow_create_engine: bool
    allow_sampling: bool
    allow_logprobs: bool
    allow_search_indices: bool
    allow_view: bool
    allow_fine_tuning: bool
    organization: str
    group: None
    is_blocking: bool


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    """When the server started, in seconds since 1970."""
    owned_by: str
    root: str
    """The model's own name, where `--served-model-name` gives it another."""
    parent: None
    max_model_len: int
    """Tokens of a prompt and its output; vLLM's name."""
    vocab_size: int
    """Token ids are below it."""
    permission: list[Permission]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


@router.get(
    "/v1/models", summary="the models, of which there is one", response_model=ModelList, responses=failures(503)
)
async def models(service: Served) -> JSONResponse:
    body: ModelList = {"object": "list", "data": [_card(service)]}
    return JSONResponse(body)


@router.get("/v1/models/{name:path}", summary="one model", response_model=ModelCard, responses=failures(404, 405, 503))
async def model(name: str, service: Served) -> JSONResponse:
    if name != service.model_name:
        raise unknown_model(name, service.model_name)
    return JSONResponse(_card(service))


def _card(service: Service) -> ModelCard:
    service.check_loaded()
    return {
        "id": service.model_name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "exeplan",
        "root": service.spec.name,
        "parent": None,
        "max_model_len": service.max_context,
        "vocab_size": service.spec.vocab_size,
        "permission": [_permission(service)],
    }


def _permission(service: Service) -> Permission:
    return {
        "id": f"modelperm-{service.model_name}",
        "object": "model_permission",
        "created": int(service.started),
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
