"""Admissions spread over the groups of a pipeline, so that its stages work at the same time at any load.

Requests that join are shared out so that the groups become as even as they can, among as few groups as hold all of
them, but no fewer than there are stages to keep busy: fewer groups leave stages idle, and more groups than stages make
passes small, which costs where a pass takes as long with few rows as with many. With every slot taken that is a group's
share of the slots. A group in flight counts half as large again, so that fewer requests wait for it to come back.

Where stages only decode (`alike`), requests are shared out among all groups, those in flight as they are: passes differ
in their rows alone, so that the largest group sets the pace of all, which costs every token, and the wait only the
first one. As few groups as hold all would take longer with one more request than the rate of prefills allows, and less
with one fewer: residents would hover around each such number.

Where nothing waits, a group that is back gives rows to the smallest group while it is more than half as large again;
one of those that are not needed any more gives all of them.

Not here: which requests are admitted.
"""

from functools import lru_cache

from exeplan.core.control_variables import slot_share
from exeplan.policies.interface import Queue


def num_joining(queue: Queue, slots: int, *, reserve: bool = False) -> int:
    """Waiting requests that fit into `slots` slots in all and into the KV cache; not counted for a single group."""
    return len(queue.admissible(slots - len(queue.running), reserve=reserve)) if len(queue.groups) > 1 else 0


def free_places(queue: Queue, number: int, *, slots: int, joining: int, alike: bool = False) -> int:
    """How many requests may join a group now, of `joining` in all that could; all groups together have `slots`.

    `alike`: among all groups, and one in flight counts as it is.
    """
    groups = queue.groups
    size = len(groups[number])
    if len(groups) == 1:
        return max(slots - size, 0)
    if not joining and len(queue.running) < slots:
        return 0
    own = max(slot_share(slots, len(groups), number) - size, 0)
    if own == 0:
        return 0
    total = sum(map(len, groups)) + joining
    if total >= slots:
        return own
    used = len(groups) if alike else groups_for(total, slots, len(groups), queue.num_decode_stages)
    if not joining or number >= used:
        return 0
    others = [len(rows) for rows in groups[:used]]
    if not alike:
        others = [size * 3 // 2 if other in queue.busy else size for other, size in enumerate(others)]
    del others[number]
    # One more joins this group only if what is left then could make all others as large as the group is now.
    places, lacking = 0, sum([size - other for other in others if other < size])
    while places < own and lacking < joining - places:
        lacking += sum([other <= size + places for other in others])
        places += 1
    return places


def even_out(queue: Queue, *, slots: int, joining: int, alike: bool = False) -> None:
    """Moves rows of groups that are not in flight; of a group whose prompt has been cut, only others."""
    if len(queue.groups) == 1:
        return
    sizes = [len(rows) for rows in queue.groups]
    total = sum(sizes) + joining
    if total >= slots:
        return
    used = len(sizes) if alike else groups_for(total, slots, len(sizes), queue.num_decode_stages)
    least = min(sizes[:used])
    if (joining or max(sizes) <= _enough(least)) and not any(sizes[used:]):
        return
    for number, rows in enumerate(queue.groups):
        while number not in queue.busy and rows and not rows[0].num_computed_tokens:
            if number < used and (joining or sizes[number] <= _enough(least)):
                break
            smallest = sizes.index(least, 0, used)
            queue.move_to_group(rows[0], smallest)
            sizes[number] -= 1
            sizes[smallest] += 1
            least = min(sizes[:used])


def _enough(least: int) -> int:
    """The size up to which a group keeps its rows."""
    return least * 3 // 2 + 1


@lru_cache(maxsize=1 << 16)  # Asked for with every pass.
def groups_for(total: int, slots: int, groups: int, stages: int) -> int:
    """Groups that take requests when there are `total`, at most `slots`."""
    used = min(stages, groups)
    while sum(slot_share(slots, groups, number) for number in range(used)) < total:
        used += 1
    return used
