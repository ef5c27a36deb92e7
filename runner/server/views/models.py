"""`/v1/models`: the model that is served, as OpenAI lists models."""

from typing import Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from typing_extensions import TypedDict

from exeplan.runner.server.service import Service
from exeplan.runner.server.views.interface import Served, failures

router = APIRouter()


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    """Tokens of a prompt and its output; vLLM's name."""


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
        raise service.unknown_model(name)
    return JSONResponse(_card(service))


def _card(service: Service) -> ModelCard:
    service.check_loaded()
    return {
        "id": service.model_name,
        "object": "model",
        "created": 0,
        "owned_by": "exeplan",
        "max_model_len": service.max_context,
    }
