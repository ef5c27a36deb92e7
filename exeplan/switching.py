"""Switching: one scheduler takes over what another has begun, and keeps the blocks of everybody it can.

A row keeps its keys and values if the new policy could have brought it where it is: prefilled whole, and handed over
where stages are set apart. What was cut into chunks, or is between the stages, goes back to the queue with its tokens;
what is finished and only kept leaves. Nothing may be under way.

Not here: what a policy does next (`exeplan/policies`), and devices that hold other layers afterwards (the engine's).
"""

from exeplan.batch import Sequence
from exeplan.scheduling import Scheduler


def take_over(new: Scheduler, old: Scheduler, *, keep: bool) -> list[Sequence]:
    """Moves all sequences of `old` to `new`, which is empty; without `keep` nobody keeps blocks.

    Returns those that held blocks and no longer do: finished ones, which are in neither, and those to be computed
    again, which are at the head of the queue, oldest first. Raises InputError, and changes neither, for a sequence that
    the new cache could not hold even alone.
    """
    assert not old.under_way
    for sequence in (*old.running, *old.waiting):
        new.check(sequence)
    left: list[Sequence] = []
    for sequence in sorted(old.running, key=lambda s: s.admission):
        sequence.in_flight = False
        fits = keep and not sequence.num_computed_tokens and sequence.num_blocks <= new.free_blocks
        if fits and not sequence.finished:
            _keep(new, sequence)
        else:
            sequence.num_blocks = sequence.num_computed_tokens = sequence.group = sequence.slot = 0
            sequence.preemptions += not sequence.finished
            left.append(sequence)
    for sequence in (*(one for one in left if not one.finished), *old.waiting):
        new.add(sequence)
    new.num_preemptions = old.num_preemptions
    if not new.policy.SEPARATE_STAGES:
        new.deal()
    return left


def _keep(new: Scheduler, sequence: Sequence) -> None:
    new.free_blocks -= sequence.num_blocks
    sequence.admission = new.num_admissions
    sequence.group = sequence.slot = 0
    new.num_admissions += 1
    new.running.append(sequence)
    if new.policy.SEPARATE_STAGES:
        new.ready.append(sequence)
