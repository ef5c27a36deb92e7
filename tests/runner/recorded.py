"""What an engine delivers while a load is played, for tests that play it more than once."""

import pytest

from exeplan.runner.engine.engine import Engine


def recorded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Lists to which each step adds its outputs, always to the last one; append an empty one before a load."""
    outputs: list[list[tuple[str, tuple[int, ...]]]] = []
    step = engine.step

    def watched() -> list:
        found = step()
        outputs[-1] += [(output.request_id, tuple(output.token_ids)) for output in found]
        return found

    monkeypatch.setattr(engine, "step", watched)
    return outputs
