"""FedTokens: sampled tokens go from the last stage to where the next batch embeds them, without passing the host.

So the next batch of the same sequences can be launched before the engine knows the tokens of this one, as on one device
(`runner/engine/async_executor.py`). On a stage that is the last and the first each rank keeps the tokens itself: those
that a graph chose are equal on all ranks, as the largest of equal logits; others are sampled by the first rank and
summed over the group. On a pipeline the first rank of the last stage sends them to all ranks of the first stage, which
keep those of as many batches as may be in flight and wait for them, on the device, where a batch needs them.

Letters: R sampled tokens of a batch. Not here: CPUs, whose engine waits for the tokens of each batch.
"""

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from exeplan.core.schedule import Placement, Schedule
from exeplan.runner.compute.model_runner import PREV_TOKENS, ModelRunner
from exeplan.runner.compute.weights.shard import Group
from exeplan.runner.distributed.links import Seat, neighbours, stage_ranks
from exeplan.runner.engine.requests import RequestState
from exeplan.scheduling.largest_passes import captured_rows

_SENDS_KEPT = 16


def most_fed(schedule: Schedule) -> int:
    """Tokens of one batch that are kept: only a batch that samples no more can be followed before they are known."""
    return max(PREV_TOKENS, captured_rows(schedule))


def most_in_flight(num_stages: int, num_micro_batches: int) -> int:
    """Batches of a phase: one on each stage that has one, and one that waits for the first stage."""
    return min(num_stages, num_micro_batches) + 1


def fed_pairs(placement: Placement) -> list[tuple[int, int]]:
    """(sender, receiver) of sampled tokens, on every pipeline that decodes."""
    ranks, found = stage_ranks(placement), []
    for phase in dict.fromkeys(stage.phase for stage in placement if stage.phase != "prefill"):
        stages = [number for number, stage in enumerate(placement) if stage.phase == phase]
        if len(stages) > 1:
            found += [(ranks[stages[-1]][0], receiver) for receiver in ranks[stages[0]]]
    return found


class FedTokens:
    """One rank's part. Every worker makes it, because every one takes part in making every group."""

    def __init__(self, placement: Placement, seat: Seat, schedule: Schedule, runner: ModelRunner, group: Group) -> None:
        """Makes room for the tokens in `runner`: before its decode iterations are captured."""
        groups = {pair: dist.new_group(pair) for pair in fed_pairs(placement)}
        self._rank, self._group, self._runner = seat.rank, group, runner
        self._targets = [(receiver, one) for (sender, receiver), one in groups.items() if sender == seat.rank]
        self._source = next(((s, one) for (s, receiver), one in groups.items() if receiver == seat.rank), None)
        self._kept: deque[tuple[dist.Work, Tensor]] = deque()
        before, after = neighbours(placement, seat.stage)
        self._alone = before is None and after is None and placement[seat.stage].phase != "prefill"
        phase = placement[seat.stage].phase
        num_stages = sum(stage.phase == phase for stage in placement)
        count = most_in_flight(num_stages, schedule.num_micro_batches) if self._source else 1
        self._width = most_fed(schedule)
        runner.keep_room_for_tokens(1 + count * self._width)
        self._rows: list[dict[str, int]] = [{} for _ in range(count)]
        """By place: of the tokens of a batch their requests, and where they are."""
        self._arriving: list[dist.Work | None] = [None] * count
        self._next = 0

    def prev_rows(self, requests: Sequence[RequestState]) -> dict[str, int]:
        """Where the runner finds the last tokens of those of these requests whose last token is not known. Has the
        current stream wait for them; any index stands for them on a stage that embeds none."""
        unknown = [request.request_id for request in requests if request.num_unknown > 0]
        if not (self._alone or self._source):
            return dict.fromkeys(unknown, 0)
        places = {request_id: self._place_of(request_id) for request_id in unknown}
        for place in set(places.values()):
            self._await(place)
        return {request_id: self._rows[place][request_id] for request_id, place in places.items()}

    def pass_on(self, requests: Sequence[RequestState], token_R: Tensor | None) -> None:
        """The tokens of these requests were sampled, on this rank, or where None on another.

        All ranks of the first and the last stage call it after each batch with the same requests.
        """
        names = [request.request_id for request in requests]
        if not names or len(names) > self._width:
            return
        if self._targets:
            assert token_R is not None
            self._send(token_R)
        elif self._source:
            self._receive(names)
        elif self._alone:
            self._share(names, token_R)

    def _share(self, names: Sequence[str], token_R: Tensor | None) -> None:
        """Among the ranks of the only stage."""
        chosen = self._runner.chosen
        if self._group.size > 1 and not (chosen is not None and token_R is chosen[0]):
            if token_R is None:
                token_R = torch.zeros(len(names), dtype=torch.int64, device=self._runner.device)
            token_R = self._group.all_reduce(token_R)
        assert token_R is not None
        self._runner.keep_tokens(token_R)
        self._rows[0] = {name: row for row, name in enumerate(names)}

    def _send(self, token_R: Tensor) -> None:
        token_R = token_R.clone()  # A graph's own are overwritten by its next replay.
        for target, group in self._targets:
            work = dist.isend(token_R, target, group=group)
            assert work is not None
            self._kept.append((work, token_R))
        while len(self._kept) > _SENDS_KEPT:
            self._kept.popleft()[0].wait()

    def _receive(self, names: Sequence[str]) -> None:
        assert self._source is not None
        place, (sender, group) = self._next, self._source
        self._await(place)
        self._next = (place + 1) % len(self._rows)
        first = 1 + place * self._width  # A row whose token is known reads index 0, in vain.
        token_R = self._runner.prev_token_B[first : first + len(names)]
        self._arriving[place] = dist.irecv(token_R, sender, group=group)
        self._rows[place] = {name: first + row for row, name in enumerate(names)}

    def _place_of(self, request_id: str) -> int:
        """Of the latest batch that sampled a token for it."""
        latest_first = (*range(self._next - 1, -1, -1), *range(len(self._rows) - 1, self._next - 1, -1))
        return next(place for place in latest_first if request_id in self._rows[place])

    def _await(self, place: int) -> None:
        if (work := self._arriving[place]) is not None:
            work.wait()
            self._arriving[place] = None
