"""`/metrics`: counters, histograms and gauges for Prometheus."""

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from exeplan.runner.server.views.interface import Served

router = APIRouter()


class Exposition(PlainTextResponse):
    media_type = CONTENT_TYPE_PLAIN_0_0_4


@router.get("/metrics", summary="metrics for Prometheus", response_class=Exposition)
async def metrics(service: Served) -> Exposition:
    return Exposition(generate_latest(service.metrics.registry))
