"""How far the searches of one optimization are: by points for `exhaustive`, by searches otherwise.

Not here: how it is shown (`exeplan/progress.py`).
"""

from collections.abc import Callable, Sequence

from exeplan.policies import load_policy
from exeplan.progress import Told

Message = tuple[int, str] | int
"""The number of GPUs of a pipeline and the policy that was searched for it; or further points that were evaluated."""
Tell = Callable[[Message], None]
EVERY = 100
"""Points between two messages."""


def tell_nothing(message: Message) -> None:
    """Used where nothing is shown."""


class SearchProgress:
    """Takes the messages of the searches, in any order; `all_points` where all of them are evaluated."""

    def __init__(
        self, told: Told, sizes: Sequence[int], policies: Sequence[str], *, all_points: int | None = None
    ) -> None:
        self._told, self.all_points = told, all_points
        self._weights = {(size, policy): _weight(size, policy) for size in sizes for policy in policies}
        self._num_done, self._done, self._points, self._last = 0, 0.0, 0, ""
        self._share = 0.0

    def take(self, message: Message) -> None:
        """Tells how far the searches are now."""
        if isinstance(message, int):
            self._points += message
        else:
            size, policy = message
            self._weights.setdefault(message, _weight(size, policy))  # A size between, found promising by the way.
            self._num_done += 1
            self._done += self._weights[message]
            self._last = f" ({policy}, {size} GPU{'s' if size != 1 else ''})"
        self.tell()

    def tell(self) -> None:
        """Tells it again: time has passed."""
        self._share = share = max(self._share, self._done / sum(self._weights.values()))
        searched = f"search {self._num_done} of {len(self._weights)}{self._last}"
        if self.all_points:
            self._told(f"{searched}, {self._points:,} of {self.all_points:,} points", self._points / self.all_points)
        else:
            self._told(searched, share)


class Counter:
    """Counts evaluated points and tells them by the hundred."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self._count = tell, 0

    def __call__(self) -> None:
        self._count += 1
        if self._count % EVERY == 0:
            self._tell(EVERY)


def _weight(size: int, policy: str) -> float:
    """How long a search takes, in proportion: large pipelines and separate stages have more placements."""
    return size**0.5 * (2.0 if load_policy(policy).SEPARATE_STAGES else 1.0)
