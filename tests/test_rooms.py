"""A room imports only from rooms below it, lazy and TYPE_CHECKING imports included; no file imports in a circle."""

import pytest

from docs.rooms import FLOOR, room_of
from docs.rooms import arrows as read_arrows


@pytest.fixture(scope="module")
def arrows() -> dict[str, set[str]]:
    return read_arrows()


def test_every_room_has_a_floor(arrows: dict[str, set[str]]) -> None:
    assert {room_of(module) for module in arrows} <= set(FLOOR)


def test_no_room_imports_from_a_room_above_it(arrows: dict[str, set[str]]) -> None:
    back = [
        f"{module} -> {other}"
        for module, others in arrows.items()
        for other in others
        if room_of(module) != room_of(other) and FLOOR[room_of(module)] < FLOOR[room_of(other)]
    ]
    assert back == []


def test_no_two_files_import_each_other(arrows: dict[str, set[str]]) -> None:
    """A circle is what remains after repeatedly removing the files that import no remaining file."""
    left = {module: set(others) for module, others in arrows.items()}
    while done := [module for module, others in left.items() if not others & set(left)]:
        for module in done:
            del left[module]
    assert left == {}
