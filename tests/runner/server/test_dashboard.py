"""The dashboard's frontier is searched once per plan, as soon as enough requests are known."""

import asyncio
from types import SimpleNamespace

from exeplan.runner.server.dashboard import Dashboard

ROWS = [{"policy": "orca"}]


def searched(*replies, plans=(0,)):
    """How often the frontier is asked for in four reads with each plan, and what is shown then."""
    asked = []

    async def frontier():
        asked.append(None)
        return replies[min(len(asked), len(replies)) - 1]

    async def read():
        page = Dashboard(SimpleNamespace(replanner=SimpleNamespace(frontier=frontier)))
        for number in plans:
            for _ in range(4):
                page._look_for_frontier(SimpleNamespace(num_replans=number))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        return page._frontier

    shown = asyncio.run(read())
    return len(asked), shown


def test_it_is_searched_until_enough_requests_are_known_and_then_once_for_each_plan():
    assert searched(None, None, ROWS) == (3, ROWS)
    assert searched(ROWS, plans=(0, 1)) == (2, ROWS)


def test_a_search_that_finds_no_plan_is_not_repeated():
    assert searched([]) == (1, [])
