"""The difference of two plans as text and as JSON values (see `exeplan.planner.reports.plan_diff`)."""

from dataclasses import asdict
from typing import Any

from exeplan.planner.reports.placement_text import show_gpus
from exeplan.planner.reports.plan_diff import Moving, PlanDiff, gains
from exeplan.planner.reports.tables import table
from exeplan.units import show_bytes, show_seconds

_LABELS = {"latency": "latency (bound)", "memory_bytes_per_gpu": "memory"}


def diff_text(diff: PlanDiff) -> str:
    """The difference for people."""
    changes = [(change.what, change.old or "-", change.new or "-") for change in diff.changes]
    if not changes and diff.old == diff.new:
        return "the plans are the same"
    lines = [table(("changes", "old", "new"), changes) if changes else "the plans differ in their estimates alone"]
    lines += ["", *_gain_lines(diff), "", *_moving_lines(diff.moving)]
    return "\n".join(lines)


def _gain_lines(diff: PlanDiff) -> list[str]:
    if diff.old is None or diff.new is None:
        which = "old" if diff.old is None else "new"
        return [f"the gain is unknown: the {which} plan has no estimate; `exeplan simulate PLAN -o PLAN` fills it in"]
    rows = [
        (
            _LABELS.get(name, name.replace("_", " ")),
            _show(name, getattr(diff.old, name)),
            _show(name, getattr(diff.new, name)),
            change,
        )
        for name, change in ((name, f"{100 * gain:+.1f} %") for name, gain in gains(diff).items())
    ]
    lines = [table(("estimate", "old", "new", "gain"), rows)]
    if not diff.same_load:
        lines.append("the estimates are for different workloads or profiles: the gain is not due to the plan alone")
    return lines


def _show(name: str, value: float) -> str:
    if name.endswith("throughput"):
        return f"{value:.4g} {'tok' if name.startswith('token') else 'req'}/s"
    return show_bytes(value) if name.startswith("memory") else show_seconds(value)


def _moving_lines(moving: Moving) -> list[str]:
    return [_load_line(moving), _request_line(moving)]


def _load_line(moving: Moving) -> str:
    loaded = {gpu: size for gpu, size in moving.loaded_bytes.items() if size >= 1}
    if not loaded:
        return "weights: every GPU already holds what it needs"
    least, most = show_bytes(min(loaded.values())), show_bytes(max(loaded.values()))
    each = least if least == most else f"{least} to {most}"
    times = ", ".join(f"{show_seconds(seconds)} {where}" for where, seconds in moving.load_seconds.items())
    what = f"load {each} each, {show_bytes(sum(loaded.values()))} in all" if len(loaded) > 1 else f"loads {each}"
    return f"weights: {show_gpus(sorted(loaded))} {what}: {times}"


def _request_line(moving: Moving) -> str:
    if moving.kv_share_kept == 1:
        if not moving.recomputed_tokens:
            return "running requests: all keys and values stay where they are, nothing is recomputed"
        return (
            f"running requests: keys and values stay, but for {moving.recomputed_tokens:.0f} tokens of the newest "
            "requests, for which the new KV cache has no room: those are recomputed"
        )
    lost = f"{100 * (1 - moving.kv_share_kept):.0f} % of the keys and values are on other GPUs"
    if moving.kv_carried:
        lost += f" ({show_bytes(moving.kv_bytes_moved)})" if moving.kv_bytes_moved is not None else ""
        short = (
            f", but for {moving.recomputed_tokens:.0f} tokens that are recomputed" if moving.recomputed_tokens else ""
        )
        return f"running requests: {lost}, and move there over host memory{short}"
    if moving.recomputed_tokens is None or moving.kv_bytes_moved is None:
        return f"running requests: {lost}, so that all of them are recomputed, or finished first"
    return (
        f"running requests: {lost} ({show_bytes(moving.kv_bytes_moved)}), so that all of them are recomputed, up to "
        f"{moving.recomputed_tokens:.0f} tokens, or finished first, which takes {show_seconds(moving.finish_seconds)}"
    )


def as_json(diff: PlanDiff) -> dict[str, Any]:
    """The difference for programs: bytes, seconds, tokens; gains relative."""
    return {
        "changes": [asdict(change) for change in diff.changes],
        "old": diff.old.to_dict() if diff.old else None,
        "new": diff.new.to_dict() if diff.new else None,
        "gains": gains(diff),
        "same_load": diff.same_load,
        "moving": asdict(diff.moving),
    }
