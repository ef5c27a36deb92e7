"""`/metrics`: counters, histograms and gauges for Prometheus."""

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from prometheus_client import generate_latest

from exeplan.runner.server.views.interface import Served

router = APIRouter()


class Exposition(PlainTextResponse):
    media_type = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/metrics", summary="metrics for Prometheus", response_class=Exposition)
async def metrics(service: Served) -> Exposition:
    return Exposition(generate_latest(service.metrics.registry))
