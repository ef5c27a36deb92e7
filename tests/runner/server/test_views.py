"""A view is one file: it is routed and described, and nothing of it is served without the key."""

import json

import pytest
from fastapi import APIRouter

from exeplan.runner.server.views import load_views

KEY = "the key"
TOY = """
from fastapi import APIRouter
from fastapi.responses import JSONResponse

from exeplan.runner.server.openai.errors import unknown_model
from exeplan.runner.server.views.interface import Served, failures

router = APIRouter()


@router.get("/toy/{size}", summary="a toy", responses=failures(404))
async def toy(size: str, service: Served) -> JSONResponse:
    if size != "small":
        raise unknown_model(size, service.model_name)
    return JSONResponse({"model": service.model_name})
"""


@pytest.fixture(scope="module")
def server(launch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("views")
    (folder / "toy.py").write_text(TOY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VIEWS_FOR_TESTS", str(folder))
        with launch(api_key=KEY, replan="off") as running:
            yield running


def test_every_view_has_a_router_with_routes():
    names = [view.__name__.rpartition(".")[2] for view in load_views()]
    wanted = "dashboard description generation metrics models plan probes replicas tokenization"
    assert names == wanted.split()
    assert all(isinstance(view.router, APIRouter) and view.router.routes for view in load_views())


def test_a_new_file_is_a_new_path(server):
    reply = server.call("/toy/small")
    assert (reply.status, json.loads(reply.text)) == (200, {"model": "tiny"})
    assert server.call("/toy/large").error["code"] == "model_not_found"


def test_a_new_path_needs_the_key(server):
    for key in ("", "Bearer wrong"):
        assert server.call("/toy/small", authorization=key).status == 401


def test_a_new_path_is_described_with_the_key_that_it_needs(server):
    operation = json.loads(server.call("/openapi.json").text)["paths"]["/toy/{size}"]["get"]
    assert operation["security"] == [{"key": []}]
    assert set(operation["responses"]) == {"200", "401", "403", "404", "431"}
