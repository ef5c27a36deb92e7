"""`/` and `/dashboard`: the page for people, and the values that it shows once a second."""

from functools import cache
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response

from exeplan.runner.server.dashboard import Dashboard, load_page
from exeplan.runner.server.service import Service
from exeplan.runner.server.views.interface import Served

router = APIRouter()
_SAFE = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


class Html(HTMLResponse):
    media_type = "text/html; charset=utf-8"


@cache
def _dashboard(service: Service) -> Dashboard:
    return Dashboard(service)


@router.get("/", summary="a page that shows the running service", response_class=Html)
@router.head("/", include_in_schema=False)
async def page() -> Html:
    found = load_page()
    return Html(found.body, headers={"content-security-policy": found.policy, "cache-control": "no-cache", **_SAFE})


@router.get("/dashboard", summary="the values that the page at / shows", response_model=dict[str, Any])
async def dashboard(service: Served) -> Response:
    body = _dashboard(service).body()
    return Response(body, media_type="application/json", headers={"cache-control": "no-store", **_SAFE})
