"""Control variables: the checks and the derived values that policies share."""

from collections.abc import Mapping

from exeplan.core.queue_order import ORDER_VARIABLES, ORDERS
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError


def require(
    schedule: Schedule, *names: str, optional: tuple[str, ...] = ("micro_batches",), orders: tuple[str, ...] = ORDERS
) -> None:
    """Raises InputError unless the schedule's control variables are these, each a positive integer, and its order is
    one of these.

    An optional one may be missing, and is 1 then; so may those of the order.
    """
    policy, values = schedule.policy, schedule.variables
    if not set(names) <= set(values) <= {*names, *optional, *ORDER_VARIABLES}:
        found = ", ".join(sorted(values)) or "none"
        raise InputError(f"policy {policy} takes the control variables {', '.join(names)}; found {found}")
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{policy}: {name} must be a positive integer, found {value!r}")
    if schedule.order not in orders:
        raise InputError(f"{policy}: order must be one of {', '.join(orders)}, found {schedule.order!r}")
    for name in {"eta_percent", "q_percent"} & set(values):
        if "das" not in schedule.order:
            raise InputError(f"{policy}: {name} is about the order das, found order {schedule.order}")
        if values[name] > 99:
            raise InputError(f"{policy}: {name} must lie between 1 and 99, found {values[name]}")


def check_token_limit(schedule: Schedule) -> None:
    """Raises InputError where more requests may decode in one pass than `max_num_batched_tokens` lets it compute."""
    limit, groups = schedule.variables.get("max_num_batched_tokens"), schedule.num_micro_batches
    if limit is None or (slots := slot_share(schedule["max_num_seqs"], groups, 0)) <= limit:
        return
    raise InputError(
        f"{schedule.policy}: max_num_seqs={schedule['max_num_seqs']} lets {slots} requests decode in one pass, which "
        f"max_num_batched_tokens={limit} limits to {limit} tokens; the most it can serve is {limit * groups}"
    )


def micro_batch_counts(num_stages: int) -> tuple[int, ...]:
    """Micro-batch counts worth trying: half as many as stages, as many, and twice as many.

    Fewer leave stages idle without making a pass shorter, more make passes small: a quarter as many and four times as
    many were never better (`benchmarks/planner/micro_batches.py`).
    """
    return tuple(sorted({max(1, num_stages // 2), num_stages, 2 * num_stages}))


def micro_batchings(num_stages: int) -> tuple[Mapping[str, int], ...]:
    """The enumerated values of a policy that enumerates micro-batches only."""
    if num_stages == 1:
        return ({},)
    return tuple({"micro_batches": count} for count in micro_batch_counts(num_stages))


def slot_share(total: int, parts: int, part: int) -> int:
    """The share of one part where `total` slots are split into nearly equal `parts`."""
    return total // parts + (part < total % parts)
