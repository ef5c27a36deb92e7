"""One fork server for the engines of a module's tests."""

from collections.abc import Iterator

import pytest

from exeplan.runner.engine_process.link import _IMPORTED
from exeplan.runner.ipc.fork_server import ForkServer


class _KeptForkServer(ForkServer):
    """Closing it ends nothing: what the engines of one test leave behind would be found by the next."""

    def close(self) -> None:
        pass

    def end_all(self) -> None:
        super().close()


@pytest.fixture(scope="module")
def shared_forks() -> Iterator[None]:
    """All engines that these tests start in this process are forked by one server, which imports torch once."""
    forks = _KeptForkServer(_IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        for module in ("client", "replicas"):
            patch.setattr(f"exeplan.runner.engine_process.{module}.engine_forks", lambda: forks)
        yield
    forks.end_all()
