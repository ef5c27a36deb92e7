"""Progress on standard error: a bar with the time left on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TypeVar

Item = TypeVar("Item")
_WIDTH = 24
_QUIET_SECONDS, _LINE_SECONDS = 2.0, 10.0
"""Work that takes less is not shown; seconds between two lines where there is no terminal."""
OnProgress = Callable[[str, float], None]
"""Called with the title of the work and the share of it that is done."""


def no_progress(title: str, share: float) -> None:
    """Used where no progress sink is set."""


class Progress:
    """Shows how far a run is; silent when not `shown`. As a context manager it leaves no half-drawn bar behind."""

    def __init__(self, title: str, *, shown: bool, on_progress: OnProgress = no_progress) -> None:
        self.title, self.shown, self._on_progress = title, shown, on_progress
        self._bar = shown and sys.stderr.isatty()
        self._drawn = False

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_line()

    def update(self, share: float, seconds_left: float, text: str) -> None:
        """Redraws the bar, on a terminal only; calls `on_progress` everywhere."""
        self._on_progress(self.title, min(share, 1.0))
        if not self._bar:
            return
        filled = round(min(share, 1.0) * _WIDTH)
        bar = "#" * filled + "." * (_WIDTH - filled)
        left = f"at most {max(seconds_left, 0):.0f} s left"
        print(f"\r\x1b[K{self.title} [{bar}] {text}, {left}", end="", file=sys.stderr, flush=True)
        self._drawn = True

    def round(self, text: str) -> None:
        """One line a round where there is no terminal."""
        if self.shown and not self._bar:
            print(f"{self.title}: {text}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """A line that stays."""
        self._end_line()
        if self.shown:
            print(text, file=sys.stderr, flush=True)

    def _end_line(self) -> None:
        if self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._drawn = False


def followed(
    items: Iterable[Item], title: str, *, count: int, clock: Callable[[], float] = time.monotonic
) -> Iterator[Item]:
    """The items, of which there are `count`; after two seconds with a bar and the time that the rest will take."""
    began = shown = clock()
    with Progress(title, shown=True) as bar:
        for number, item in enumerate(items, 1):
            yield item
            if (now := clock()) - began < _QUIET_SECONDS:
                continue
            left = (now - began) * (count - number) / number
            bar.update(number / count, left, f"{number} of {count}")
            if now - shown >= _LINE_SECONDS or shown == began:
                shown = now
                bar.round(f"{number} of {count}, about {left:.0f} s left")
