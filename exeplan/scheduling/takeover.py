"""Plan switch: a new scheduler takes over the sequences of another, and their KV blocks where it can.

A sequence keeps its keys and values if the new policy could have brought it to the same point: prefilled whole, and
transferred where stages are separate. A sequence in the middle of a chunked prefill or a KV transfer goes back to the
queue with its tokens; a finished one that was only kept leaves. No batch may be in flight.

Not here: the policy's next batch (`exeplan/policies`), and the migration of keys and values to devices that hold other
layers afterwards (`runner/engine`).
"""

from collections.abc import Iterable

from exeplan.core.batch import SequenceState
from exeplan.scheduling.scheduler import Scheduler


def can_keep_blocks(new: Scheduler, old: Scheduler) -> list[SequenceState]:
    """The sequences of `old` that could keep their blocks in `new`, which is empty; oldest first."""
    kept, room = [], new.free_blocks
    for sequence in _by_age(old):
        whole = not sequence.num_computed_tokens and not sequence.finished
        if whole and sequence.num_blocks <= room:
            room -= sequence.num_blocks
            kept.append(sequence)
    return kept


def take_over(new: Scheduler, old: Scheduler, *, keep: Iterable[SequenceState]) -> list[SequenceState]:
    """Moves all sequences of `old` to `new`, which is empty; `keep`, some of `can_keep_blocks`, keep their blocks.

    Returns those that held blocks and no longer do: finished ones, which are in neither, and those to be computed
    again, which are at the head of the queue, oldest first. Raises InputError, and changes neither, for a sequence that
    the new cache could not hold even alone.
    """
    assert not old.in_flight
    for sequence in (*old.running, *old.waiting):
        new.check(sequence)
    left: list[SequenceState] = []
    kept = set(keep)
    for sequence in _by_age(old):
        sequence.in_flight = False
        if sequence in kept:
            _keep(new, sequence)
        else:
            sequence.num_blocks = sequence.num_computed_tokens = sequence.group = sequence.slot = 0
            sequence.preemptions += not sequence.finished
            left.append(sequence)
    for sequence in (*(one for one in left if not one.finished), *old.waiting):
        new.add_again(sequence)
    new.num_preemptions = old.num_preemptions
    if not new.policy.SEPARATE_STAGES:
        new.rebalance()
    return left


def _by_age(scheduler: Scheduler) -> list[SequenceState]:
    return sorted(scheduler.running, key=lambda s: s.admission)


def _keep(new: Scheduler, sequence: SequenceState) -> None:
    new.free_blocks -= sequence.num_blocks
    sequence.admission = new.num_admissions
    sequence.group = sequence.slot = 0
    new.num_admissions += 1
    new.running.append(sequence)
    new.on_ranks[sequence.rank] += 1
    if new.policy.SEPARATE_STAGES:
        new.ready.append(sequence)
