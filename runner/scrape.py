"""The Prometheus metrics of a server as they are now.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import http.client
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric

_PATIENCE_SECONDS = 5.0


def scrape(url: str, headers: Mapping[str, str], tls_ca: Path | None = None) -> "list[Metric]":
    """All families that `url` shows. Raises OSError where nobody answers, and ValueError for other text."""
    from prometheus_client.parser import text_string_to_metric_families

    from exeplan.runner.load import trusting

    request = urllib.request.Request(url, headers=dict(headers))
    tls = urllib.request.HTTPSHandler(context=trusting(tls_ca))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), tls)
    try:
        with opener.open(request, timeout=_PATIENCE_SECONDS) as answer:
            return list(text_string_to_metric_families(answer.read().decode()))
    except http.client.HTTPException as error:
        raise OSError(f"{url} gave no whole answer ({type(error).__name__})") from error
