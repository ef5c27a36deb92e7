"""What SIGHUP has read again besides the plan: API keys and certificates."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from exeplan.errors import InputError
from exeplan.runner.server.network.api_keys import ApiKeys
from exeplan.runner.server.network.clients import Clients
from exeplan.runner.server.network.tls import Tls

log = logging.getLogger(__name__)


def read_again(keys: ApiKeys, tls: Tls | None, clients: Clients) -> Callable[[], Awaitable[None]]:
    """Reads them in a thread: a thousand keys take half a second. What is wrong changes nothing."""

    async def read() -> None:
        try:
            if tls:
                await asyncio.to_thread(tls.reload)
        except InputError as error:
            log.error("%s; certificates stay as they were", error)
        try:
            if number := await asyncio.to_thread(keys.reload):
                log.info("%d API keys, from now on", number)
                clients.count_from_now(keys.clients)
        except InputError as error:
            log.error("%s; API keys stay as they were", error)

    return read
