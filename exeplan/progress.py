"""Progress on standard error: a bar with the time left on a terminal, plain lines elsewhere."""

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

Item = TypeVar("Item")
_WIDTH, _WIDE = 24, 120
"""Characters of the bar on terminals of at least so many columns; a third of it on others."""
_QUIET_SECONDS, _LINE_SECONDS = 2.0, 10.0
"""Work that takes less is not shown; seconds between two lines where there is no terminal."""
_DRAW_SECONDS, _LEAST_SHARE = 0.1, 0.01
"""Seconds between two drawings on a terminal; the share from which the rest is estimated."""
OnProgress = Callable[[str, float], None]
"""Called with the title of the work and the share of it that is done."""


def no_progress(title: str, share: float) -> None:
    """Used where no progress sink is set."""


def note(remarks: Iterable[str]) -> None:
    """Tells a person what was understood in a way that they may not expect, a line each."""
    for remark in remarks:
        print(f"note: {remark}", file=sys.stderr, flush=True)


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
        self.line(share, f"{text}, at most {max(seconds_left, 0):.0f} s left")

    def line(self, share: float, text: str) -> None:
        """Redraws the bar with this text, on a terminal only."""
        if not self._bar:
            return
        columns = shutil.get_terminal_size().columns
        width = _WIDTH if columns >= _WIDE else _WIDTH // 3
        filled = round(min(share, 1.0) * width)
        bar = "#" * filled + "." * (width - filled)
        shown = f"{self.title} [{bar}] {text}"[: columns - 1]  # A line that wraps could not be redrawn.
        print(f"\r\x1b[K{shown}", end="", file=sys.stderr, flush=True)
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


class Told:
    """What long work tells of itself, its share done from 0 to 1; this one shows nothing."""

    def __call__(self, title: str, share: float) -> None:
        """The work at hand, and the share of all work that is done."""

    def note(self, text: str) -> None:
        """A line that stays."""

    def part(self, begin: float, end: float, title: str = "") -> "Told":
        """For a part of the work, which is these shares of it; the title stands before its own."""
        return _Part(self, begin, end, title)


@dataclass(frozen=True, slots=True)
class _Part(Told):
    whole: Told
    begin: float
    end: float
    title: str

    def __call__(self, title: str, share: float) -> None:
        share = self.begin + (self.end - self.begin) * min(share, 1.0)
        self.whole(": ".join(filter(None, (self.title, title))), share)

    def note(self, text: str) -> None:
        self.whole.note(text)


class Shown(Told):
    """On standard error: after two seconds the work at hand, the share that is done and about how long the rest takes.

    A line that redraws itself on a terminal, and a line every ten seconds elsewhere; as a context manager it leaves no
    half-drawn line behind.
    """

    def __init__(self, title: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._bar = clock, Progress(title, shown=True)
        self._began, self._drawn, self._said = clock(), -math.inf, -math.inf

    def __enter__(self) -> "Shown":
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)

    def __call__(self, title: str, share: float) -> None:
        now = self._clock()
        if (lasted := now - self._began) < _QUIET_SECONDS or now - self._drawn < _DRAW_SECONDS:
            return
        self._drawn = now
        left = f", about {show_left(lasted * (1 - share) / share)} left" if share >= _LEAST_SHARE else ""
        text = f"{100 * share:.0f} %{left}; {title}"
        self._bar.line(share, text)
        if now - self._said >= _LINE_SECONDS:
            self._said = now
            self._bar.round(text)

    def note(self, text: str) -> None:
        self._bar.note(text)


def show_left(seconds: float) -> str:
    """Seconds that are left, for people: not more digits than an estimate has."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


SILENT = Told()


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
