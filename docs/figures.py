"""The figures that the pages quote: a function from a record of benchmarks/records to the text of a mark.

`FIGURES[record][figure]`; every record also has the figure `record`: which file it is, of which commit, date and
command, and whether that tree was dirty. Intervals hold 95 %. A new figure is an entry here and a mark in a page
(`docs/marks.py`).
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lib.intervals import of_median, wilson
from benchmarks.lib.record import RECORDS
from benchmarks.paper.claims import CLAIM_HEADER, Claim
from exeplan.planner.problems.ranking import half_interval

Record = Mapping[str, Any]


class FigureError(Exception):
    """A mark that has no figure, or a figure whose record lacks what it is made of."""


def text_of(record: str, figure: str) -> str:
    """What stands in a mark. Raises FigureError."""
    body = read(record)
    if figure == "record":
        return origin(record, body)
    made = FIGURES.get(record, {}).get(figure)
    if made is None:
        known = ", ".join(["record", *FIGURES.get(record, {})])
        raise FigureError(f"docs/figures.py has no figure {figure!r} of the record {record!r}; it has {known}")
    try:
        return made(body)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FigureError(
            f"docs/figures.py cannot make {figure!r} of benchmarks/records/{record}.json, which has "
            f"{', '.join(body)}: {type(error).__name__} {error}. Change the function, or write the record again with "
            f"`{body.get('command')}`"
        ) from error


@cache
def read(record: str) -> Record:
    """A record. Raises FigureError where there is none."""
    path = RECORDS / f"{record}.json"
    if not path.exists():
        known = ", ".join(sorted(path.stem for path in RECORDS.glob("*.json")))
        raise FigureError(f"no record {record!r} in benchmarks/records; there are {known}")
    body: Record = json.loads(path.read_text(encoding="utf-8"))
    return body


def origin(record: str, body: Record) -> str:
    """File, date, commit and command of a record; that of a dirty tree is called so, and so are parts of others."""
    dirty = ", a dirty tree" if is_dirty(body) else ""
    command = f", `{body['command']}`" if " -" in body["command"].removeprefix("python -m ") else ""
    made = {part.get("commit") for part in _parts(body)} - {body["commit"]}
    named = ", ".join(f"`{commit}`" if commit else "earlier ones" for commit in sorted(made, key=str))
    others = f", parts of {named}" if made and len(made) < len(_parts(body)) else ""
    return f"`{record}.json`, {body['date']}, commit `{body['commit']}`{others}{dirty}{command}"


def _parts(body: Record) -> list[Record]:
    """Those that may have been made one by one."""
    found = body.get("parts")
    return list(found.values()) if isinstance(found, Mapping) else []


def is_dirty(body: Record) -> bool:
    """Whether the tree had changes that its commit does not hold, so that this code cannot be run again."""
    return bool(body["commit"].endswith("-dirty"))


# --- words ------------------------------------------------------------------------------------------------------------


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def span(low: float, high: float, shown: Callable[[float], str]) -> str:
    """`1.2 to 3.4 %`, `39 ms to 0.165 s`: a unit that both have stands once."""
    first, last = shown(low), shown(high)
    (number, _, unit), (*_, other) = first.partition(" "), last.partition(" ")
    return f"{number if unit == other else first} to {last}"


def signed(share: float) -> str:
    return f"{100 * share:+.1f} %"


def middle(values: Sequence[float], shown: Callable[[float], str]) -> str:
    """A median with its interval."""
    found = of_median(values)
    interval = f" ({span(*found, shown)})" if found else f" (of {len(values)}, too few for an interval)"
    return shown(median(values)) + interval


def times(factor: float) -> str:
    return f"{factor:.2f} times"


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def secs(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.1 else ms(seconds)


def mib(number: float) -> str:
    return f"{number:.0f} MiB"


def count(number: int) -> str:
    return f"{number:,}"


def share_of(successes: int, trials: int) -> str:
    """`43 of 45 (85.2 to 98.8 %)`."""
    low, high = wilson(successes, trials)
    digits = 1 if percent(low) != percent(high) else 3
    return f"{successes:,} of {trials:,} ({span(low, high, lambda share: percent(share, digits))})"


def rows(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in body)])


# --- adjusted plans ---------------------------------------------------------------------------------------------------


def adjusted_plans(record: Record) -> str:
    """By policy and bounded metric, what the best adjusted schedules serve over the best ones without."""
    found: dict[tuple[str, str], list[list[float] | None]] = {}
    for case in record["cases"]:
        policy = case["name"].split(", ")[1]
        plain, best = case["plain"]["throughput"], case["adjusted"]
        gains = [a / b - 1 for a, b in zip(best["throughput"], plain, strict=True)] if best else None
        found.setdefault((policy, case["metric"]), []).append(gains)
    header = (
        "policy",
        "bound on",
        "cases",
        "none keeps it",
        "smallest of the others",
        "median",
        "largest",
        "over 1 % more",
        "over 1 % less",
    )
    body = []
    for (policy, metric), cases in found.items():
        kept = [gains for gains in cases if gains]
        means, halves = ([of(gains) for gains in kept] for of in (_mean, half_interval))
        more = sum(mean - half > 0.01 for mean, half in zip(means, halves, strict=True))
        less = sum(mean + half < -0.01 for mean, half in zip(means, halves, strict=True))
        spread = [signed(of(means)) for of in (min, median, max)]
        body.append(
            (f"`{policy}`", metric, str(len(cases)), str(len(cases) - len(kept)), *spread, str(more), str(less))
        )
    return rows(header, body)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# --- two cores and equal requests -------------------------------------------------------------------------------------


def two_cores(record: Record) -> str:
    """What a pipeline and a tensor-parallel group of two cores serve at best, times one core."""
    header = (
        "requests",
        "pipeline, alone",
        "pipeline, both busy",
        "tensor parallel, alone",
        "tensor parallel, both busy",
    )
    pairs = zip(record["alone"], record["together"], strict=True)
    keys = ("pipeline", "tensor_parallel")
    return rows(header, [(str(a["requests"]), *(times(x[key]) for key in keys for x in (a, b))) for a, b in pairs])


def equal_requests(other: str) -> Callable[[Record], str]:
    """CPU time of `orca` over that of another, over batches and prompts."""

    def made(record: Record) -> str:
        ratios = [row[f"over {other}"] for row in record["rows"]]
        return span(min(ratios), max(ratios), times)

    return made


def equal_of_batch(batch: int) -> Callable[[Record], str]:
    """The same over transformers, of one batch."""

    def made(record: Record) -> str:
        ratios = [row["over transformers"] for row in record["rows"] if row["batch"] == batch]
        return span(min(ratios), max(ratios), times)

    return made


# --- plans and their search -------------------------------------------------------------------------------------------


def best_plans(record: Record) -> str:
    """The table of the README; policies with the same plan share a row."""
    body: dict[tuple[Any, ...], list[str]] = {}
    for row in record["rows"]:
        plan = row["schedule"].partition("(")[2].removesuffix(")")
        each = record["gpus"] // row["replicas"]
        placed = f"{row['replicas']} x {each} GPU{'s' if each > 1 else ''}: {plan}"
        requests = f"{row['requests/s']:.1f} ± {row['requests/s +-']:.1f}"
        latency = f"{row['latency s']:.2f} ± {row['latency s +-']:.2f} s"
        kept = f"{row['replays in bound']} of {record['replays']}"
        body.setdefault((placed, requests, latency, kept), []).append(row["policy"])
    header = ("policy", "best plan", "requests/s", "latency", "replays in the bound")
    return rows(header, [(f"`{'`, `'.join(policies)}`", *cells) for cells, policies in body.items()])


def searched(key: str) -> Callable[[Record], str]:
    """In how many cases the search found the optimum of trying everything, or more between the listed values, and how
    far it was off in the others."""

    def made(record: Record) -> str:
        losses = [case["loss"] for case in record[key]]
        found, above = sum(loss < 1e-9 for loss in losses), sum(loss < -1e-9 for loss in losses)
        more = f", of which {above} have more than that, between the values listed" if above else ""
        rest = f", at most {percent(max(losses))} less throughput in the others" if found < len(losses) else ""
        return f"{share_of(found, len(losses))}{more}{rest}"

    return made


def searched_of_paper(*, whole: bool) -> Callable[[Record], str]:
    """The same of the paper's scenarios whose points were all tried, or of the others, of which points were drawn;
    without cases in which neither has a schedule within the limits."""

    def made(record: Record) -> str:
        losses = [
            case["loss"] for case in record["cases"] if case["whole"] == whole and (case["found"] or case["loss"])
        ]
        above, alone = sum(loss < -1e-9 for loss in losses), sum(loss == -1 for loss in losses)
        more = f", {above} of them with more" + (f" ({alone} where those have nothing in the bound)" if alone else "")
        return f"{share_of(sum(loss < 1e-9 for loss in losses), len(losses))}{more}"

    return made


def evaluations(record: Record) -> str:
    shares = [row["points"] / row["grid"] for row in record["rows"] if row["grid"] >= 5000]
    return f"{middle(shares, percent)}, {percent(max(shares))} at most, on {len(shares)} grids of 5,000 points and more"


def cluster_evaluations(record: Record) -> str:
    points, grid = (sum(case[key] for case in record["cases"]) for key in ("points", "grid"))
    return f"{percent(points / grid)} of {grid:,} points"


def planning_times(record: Record) -> str:
    header = ("model on GPUs, workload, bounds", "answer", "wall", "slowest", "CPU")
    return rows(
        header,
        [
            (row["case"].replace("--", ""), row["answer"], secs(row["wall s"]), secs(row["most s"]), secs(row["CPU s"]))
            for row in record["rows"]
        ],
    )


# --- predictions ------------------------------------------------------------------------------------------------------


def closed_form_errors(record: Record) -> str:
    by_policy: dict[str, list[tuple[float, float]]] = {}
    for case in record["cases"]:
        by_policy.setdefault(case["policy"], []).append((abs(case["errors"][0]), abs(case["errors"][1])))
    by_policy["all"] = [errors for found in by_policy.values() for errors in found]
    header = ("policy", "cases", "throughput, median", "95th percentile", "worst", "latency, median", "95th", "worst")
    return rows(header, [(name, str(len(found)), *_spread(found)) for name, found in by_policy.items()])


def _spread(errors: Sequence[tuple[float, float]]) -> list[str]:
    cells = []
    for values in zip(*errors, strict=True):
        cells += [middle(values, percent), percent(float(np.quantile(values, 0.95))), percent(max(values))]
    return cells


def risk_left_out(record: Record) -> str:
    """The margin of plans against none, on deployments left out whole."""
    header = ("bounds", "margin", "runs", "broke the bound", "95 % of it", "refused", "throughput kept, mean")
    return rows(
        header,
        [
            (
                row["bounds"],
                "as planned" if row["margin"].startswith("by deployment") else row["margin"],
                *(row[key] for key in ("cases", "broken", "95 % of it", "refused", "kept, mean")),
            )
            for row in record["left_out"]
            if row["margin"] == "none" or row["margin"].startswith("by deployment")
        ],
    )


def risk_corrected(record: Record) -> str:
    """Picks by corrected predictions, with and without the margin."""
    header = (
        "bounds",
        "known",
        "margin",
        "cases",
        "broke the bound",
        "95 % of it",
        "refused",
        "throughput kept, mean",
        "within 5 % of the best",
    )
    return rows(header, [tuple(row.values()) for row in record["left_out"]])


def risk_by_deployment(record: Record) -> str:
    """The same, deployment by deployment, with the margin."""
    header = (
        "deployment",
        "known",
        "cases",
        "broke the bound",
        "refused",
        "throughput kept, mean",
        "within 5 % of the best",
    )
    return rows(header, [tuple(row.values()) for row in record["deployments"]])


def risk_traces(record: Record) -> str:
    """Plans on few requests of a law, played with others."""
    keys = ("law", "requests", "margin", "median", "plans", "kept the bound", "95 % of it")
    header = ("law", "requests planned on", "margin", "its median", "plans", "kept the bound", "95 % of it")
    return rows(header, [tuple(row[key] for key in keys) for row in record["traces"]])


def errors_of(figure: str, clock: str) -> Callable[[Record], str]:
    """Sizes of the errors of predictions: the median over cases with its interval, and the worst.

    Without the cases whose slices were too short for an interval.
    """

    def made(record: Record) -> str:
        errors = (row["errors"][clock][figure] for row in record["rows"])
        sizes = [abs(error["value"]) for error in errors if error and error["low"] is not None]
        return f"{middle(sizes, percent)} off in the median and {percent(max(sizes))} at worst"

    return made


def speed_free(record: Record) -> str:
    runs = [row["runs"][0] for row in record["rows"]]
    products = [[run[key]["throughput"] * (run[key]["latency"] or 0) for key in ("replay", "measured")] for run in runs]
    return middle([abs(replayed / measured - 1) for replayed, measured in products if measured], percent)


def rankings(record: Record) -> str:
    """How often the policy that was planned best was measured best, or within noise of it."""
    right = sum("NOT" not in ranking["text"] for ranking in record["rankings"])
    same = sum(ranking["planned_best"] == ranking["measured_best"] for ranking in record["rankings"])
    taus = [ranking["tau"] for ranking in record["rankings"]]
    return (
        f"{same} of {len(taus)} times, and was within noise of it in {right - same} more; Kendall's tau of the two "
        f"rankings is {median(taus):.2f} in the median"
    )


def bounds_kept(record: Record) -> str:
    found = (record["summary"][f"bounds kept, {clock}"] for clock in ("as measured", "at profiling speed"))
    real, even = (share_of(one["kept"], one["of"]) for one in found)
    return f"{real} as measured and {even} at profiling speed"


def cases_and_rounds(record: Record) -> str:
    plans, profiles = len(record["rows"]), len({row["round"] for row in record["rows"]})
    short = sum(row["errors"]["at profiling speed"]["throughput"]["low"] is None for row in record["rows"])
    left_out = f", {short} plans left out whose slices were too short for an interval" if short else ""
    no_latency = sum(row["errors"]["at profiling speed"]["latency"] is None for row in record["rows"])
    left_out += f", {no_latency} of them without a latency, as their slices were too short" if no_latency else ""
    return f"{plans} plans, {profiles} profile{'s' * (profiles > 1)}{left_out}"


def errors_of_runs(first: str, named: Callable[[Record], str]) -> Callable[[Record], str]:
    """A table of replay over measured - 1, a row a plan."""

    def text(record: Record) -> str:
        keys = [(key, kind) for key in ("throughput", "latency") for kind in ("measured", "measured_at_profile_speed")]
        return rows(
            (
                first,
                *("throughput, as measured", "at profiling speed"),
                *("latency, as measured", "at profiling speed"),
            ),
            [(named(row), *(signed(_replay_error(row, *key)) for key in keys)) for row in record["rows"]],
        )

    return text


def errors_at_rates(record: Record) -> str:
    """Sizes of errors by load, their median and their worst: as predicted, and by a replay at the measured speed."""
    names = {"ttft": "mean ttft", "tpot": "mean tpot", "latency": "latency", "latency_p99": "p99 latency"}
    kinds = {"replay": "as predicted", "replay_at_measured_speed": "at the measured speed"}
    body = []
    for load in record["loads"]:
        for kind, words in kinds.items():
            errors = [row["errors"][kind] for row in record["rows"] if row["load"] == load]
            sizes = [[abs(one[name]) for one in errors] for name in names]
            body.append((f"{load:g}", words, *(f"{percent(median(each))}, {percent(max(each))}" for each in sizes)))
    return rows(("share of the capacity", "replay", *(f"{name}: median, worst" for name in names.values())), body)


def demo_errors(record: Record) -> str:
    """How many figures of the demo were as asked, the intervals that held, their widths and the time."""
    found = record["found"]
    return (
        f"{found['as asked']} of {found['rows']} figures are within 5 % (10 % of latency) or within "
        "an interval of their own no wider than +-10 %, "
        f"{share_of(found['held'], found['rows'])} intervals hold the measurement, the widest is "
        f"+-{found['widest']:.1f} %, and the longest demo took {found['longest']:.0f} s"
    )


def demo_runs(record: Record) -> str:
    return f"{len(record['runs'])} runs, {record['busy']} of them next to a busy loop on the other core"


def gains_of_two(record: Record) -> str:
    """Throughput of two engines over one's: planned and measured, of each model."""
    return ", ".join(
        f"{times(gain['replay'])} planned and {times(gain['measured'])} measured with {model}"
        for model, gain in record["two over one"].items()
    )


def _replay_error(row: Record, key: str, kind: str) -> float:
    """Replay over measured - 1, of the medians of the rounds."""
    return float(median(run["replay"][key] for run in row["runs"]) / median(run[kind][key] for run in row["runs"]) - 1)


class _TraceRun(NamedTuple):
    trace: str
    policy: str
    excess: float
    """Measured latency over the bound - 1."""
    over_static: str
    over_orca: str


def _trace_runs(record: Record) -> list[_TraceRun]:
    """Of the plans that there are: a row holds case, bound, schedule, placement, requests/s, latency and two ratios."""
    found = []
    for case, bound, _, _, throughput, latency, over_static, over_orca in record["rows"]:
        if throughput:
            trace, policy = case.split()
            found.append(_TraceRun(trace, policy, float(latency) / float(bound) - 1, over_static, over_orca))
    return found


def trace_ratios(record: Record) -> str:
    return rows(
        ("trace", "policy", "throughput over `static`", "over `orca`", "measured latency over the bound"),
        [
            (run.trace, f"`{run.policy}`", f"{run.over_static} times", f"{run.over_orca} times", signed(run.excess))
            for run in _trace_runs(record)
        ],
    )


def trace_bounds(record: Record) -> str:
    found = _trace_runs(record)
    kept = sum(run.excess <= 0 for run in found)
    most = max(run.excess for run in found)
    return f"{share_of(kept, len(found))} kept their bound and the slowest took {1 + most:.2f} times its bound"


def if_made(part: str, text: Callable[[Record], str], *, block: bool = False) -> Callable[[Record], str]:
    """The text of a part; where the record has none, the command that makes it, as a block or a phrase."""
    missing = f"no record yet, `python -m benchmarks.paper {part}` makes it" + "\n" * block
    return lambda record: text(record) if part in record["parts"] else missing


def _claimed(record: Record, part: str, what: str) -> Mapping[str, Any]:
    """The first claim of a part whose description begins like this."""
    return next(claim for claim in record["parts"][part]["claims"] if claim["what"].startswith(what))


def paper_gains(part: str) -> Callable[[Record], str]:
    """Mean and largest gain over both FasterTransformers, next to the paper's."""

    def made(record: Record) -> str:
        packed, padded, largest = (
            _claimed(record, part, what) for what in ("mean gain over FT", "mean gain over FT, padded", "largest gain")
        )
        return (
            f"{times(packed['ours'])} what FasterTransformer does that packs prompts, {times(padded['ours'])} what one "
            f"does that pads them (the paper: {packed['paper']:.1f}); at most {times(largest['ours'])} (the paper: "
            f"{largest['paper']:.1f})"
        )

    return made


def paper_against(part: str) -> Callable[[Record], str]:
    """Against the better of `orca` and `chunked` on the same kernels."""

    def made(record: Record) -> str:
        mean_gain, compared, won = (
            _claimed(record, part, what)["ours"]
            for what in ("mean gain over the better", "cells compared", "cells won")
        )
        return f"{times(mean_gain)} in the mean, with {won} of {compared} cells won and {compared - won} lost"

    return made


def paper_claims(part: str) -> Callable[[Record], str]:
    """The paper's figures of a part next to ours, and why they differ."""

    def made(record: Record) -> str:
        claims = record["parts"][part]["claims"]
        keys = ("what", "paper", "ours", "reason")
        table = rows(CLAIM_HEADER, [Claim(**{key: claim[key] for key in keys}).cells() for claim in claims])
        picture = _PICTURES.get(part)
        return f"{table}\n\n![Drawn from the record](pictures/{picture}.png)" if picture else table

    return made


_PICTURES = {
    **{part: f"paper-{part}" for part in ("fig6", "fig7", "fig8", "fig10", "orca10", "orca11")},
    "drift": "paper-fig11",
}
"""By part what `python -m docs.make_pictures` draws of it."""
PAPER_PARTS = (
    *("fig6", "fig7", "fig8", "fig9", "splits", "fig10", "table4", "table5", "table6", "table7", "drift", "search"),
    *("orca8", "orca9", "orca10", "orca11", "tcb"),
)
"""Of benchmarks/paper, in the order of its record."""


def today_summary(record: Record) -> str:
    text: str = record["parts"]["today"]["notes"][0]
    return text


def today_cases(record: Record) -> str:
    """Requests/s of every policy; - where none of its schedules keeps the bound."""
    policies = ("rra", "waa-c", "orca", "chunked")
    header = ("deployment, lengths, bound", "bound", *(f"`{policy}`" for policy in policies), "ExeGPT over the others")
    return rows(
        header,
        [
            (
                row["case"],
                "none" if row["bound s"] == "inf" else secs(row["bound s"]),
                *("-" if row[policy] is None else f"{row[policy]:.3g}" for policy in policies),
                "-" if row["over the others"] is None else times(row["over the others"]),
            )
            for row in record["parts"]["today"]["rows"]
        ],
    )


def today_measured(record: Record) -> str:
    """`rra` over the better of `orca` and `chunked`, planned and measured on the engine, by length law and bound."""
    by_case: dict[tuple[int, str, str], dict[str, list[Any]]] = {}
    for row in record["rows"]:
        by_case.setdefault((row["round"], row["workload"], row["bound"]), {}).setdefault(row["policy"], []).append(row)
    found = []
    for (_, law, bound), policies in by_case.items():
        ratios = [_rra_over_others(policies, key) for key in ("planned", "sustained")]
        found.append((law, f"{bound} s", *map(times, ratios)))
    return rows(("lengths", "bound", "predicted", "measured"), found)


def _rra_over_others(policies: Mapping[str, Sequence[Record]], key: str) -> float:
    """Medians of the rounds."""
    rate = {policy: median(float(row[key]) for row in found) for policy, found in policies.items()}
    return rate["rra"] / max(rate["orca"], rate["chunked"])


def waa_measured(record: Record) -> str:
    """`waa-c` on one worker for each phase over `orca` with tensor parallelism, replayed and measured: throughput, and
    what latency each has."""
    one = {
        name: next(row for row in record["rows"] if row["case"].startswith(name)) for name in ("1+1 waa", "TP 2 orca")
    }
    replayed, measured = (
        [float(median(run[kind]["throughput"] for run in row["runs"])) for row in one.values()]
        for kind in ("replay", "measured_at_profile_speed")
    )
    latencies = [float(median(run["replay"]["latency"] for run in row["runs"])) for row in one.values()]
    return (
        f"{times(replayed[0] / replayed[1])} by replay and {times(measured[0] / measured[1])} at profiling speed, at "
        f"{times(latencies[0] / latencies[1])} the latency, as each has a bound of its own"
    )


def paper_stage_times(record: Record) -> str:
    claims = [claim for claim in record["parts"]["table7"]["claims"] if "paper's stage times" in claim["what"]]
    return percent(max(abs(claim["difference"]) for claim in claims))


_POOLED = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end"}


def silicon_errors(record: Record) -> str:
    total = next(row for row in record["errors"] if row[0] == "all")
    ttft, tpot, e2e = (cell.split()[0] for cell in total[2:])
    return f"TTFT {ttft} %, TPOT {tpot} %, end to end {e2e} %, over {total[1]} runs"


def silicon_picks(record: Record) -> str:
    pick = next(row for row in record["picks"] if row[:2] == ["each measured e2e", "none"])
    broken = round(float(pick[3].split()[0]) / 100 * int(pick[2]))
    return f"{share_of(broken, int(pick[2]))}, keeping {pick[5]} of the best throughput"


def pooling_sentence(record: Record) -> str:
    """Medians over deployments left out whole, without and with three of their runs."""
    found, medians = record["deployments"], record["medians"]
    without, three = (
        ", ".join(f"{words} {100 * medians[kind][name]:.0f} %" for name, words in _POOLED.items())
        for kind in ("none of its rows", "three of its rows")
    )
    runs, more = sum(one["runs"] for one in found), sum(bool(one["three of its rows"]) for one in found)
    return f"{without} ({len(found)} deployments, {runs} runs); with three of its runs {three} ({more} deployments)"


def pooling_medians(record: Record) -> str:
    """A line for each kind of prediction, with its protocol."""
    words = {
        "uncorrected": "datasheet and one set of constants, nothing fitted",
        "none of its rows": "the deployment left out whole",
        "three of its rows": "the deployment left out but for three of its runs",
    }
    lines = ["| predicted with | TTFT | TPOT | end to end |", "|---|---|---|---|"]
    for kind, errors in record["medians"].items():
        cells = " | ".join(f"{100 * errors[name]:.1f} %" for name in ("ttft", "tpot", "e2e"))
        lines.append(
            f"| {words[kind]} ({sum(bool(one[kind]) for one in record['deployments'])} deployments) | {cells} |"
        )
    return "\n".join(lines)


def noise_floor(record: Record) -> str:
    """TTFT, TPOT and end to end by deployment."""
    header = ("deployment", "runs", "noise, %", "interpolated by the others, %", "one correction of all, %")
    medians = [" / ".join(f"{100 * value:.1f}" for value in errors.values()) for errors in record["medians"].values()]
    body = [tuple(row.values()) for row in record["floor"]]
    return rows(header, [*body, ("median", "", *medians)])


def noise_floor_picks(record: Record) -> str:
    """Without a margin, and with the least one for all cases with which one pick in a hundred breaks."""
    header = (
        "predicted by",
        "broke the bound",
        "throughput kept, mean",
        "within 5 % of the best",
        "least margin",
        "broke it then",
        "kept then",
    )
    return rows(header, [(name, *cells) for name, _, *cells in (row.values() for row in record["picks"])])


def a100_errors(stack: str) -> Callable[[Record], str]:
    def made(record: Record) -> str:
        row = next(
            row for row in record["rows"] if (row["stack"], row["model"], row["phase"]) == (stack, "all", "both")
        )
        before, after = (
            row[key].split(";")[1].split("/")[0].strip() for key in ("as imported", "kernels and launches")
        )
        return f"{before} % off in the median of {row['rows']} rows as imported, {after} % with two constants"

    return made


# --- engine and server ------------------------------------------------------------------------------------------------

_PEERS = {
    "generate": "`generate`",
    "continuous": "transformers' continuous batching",
    "openvino": "OpenVINO GenAI",
    "ctranslate2": "CTranslate2",
    "vllm": "vLLM's CPU build",
}


def engine_rates(record: Record) -> str:
    rates = record["rates"]
    body = [
        (title, *(_over(rates[load]["exeplan"], rates[load][peer]) for load in ("W1", "W2")))
        for peer, title in _PEERS.items()
        if peer in rates["W1"]
    ]
    return rows(("exeplan over", "requests of equal length", "ragged lengths"), body)


def _over(ours: Sequence[float], theirs: Sequence[float]) -> str:
    if len(theirs) < len(ours):  # The record does not say which of its runs failed.
        return f"{times(median(ours) / median(theirs))} (of {len(theirs)} runs; the others failed)"
    pairs = [one / other for one, other in zip(ours, theirs, strict=True)]
    return f"{times(median(ours) / median(theirs))} ({min(pairs):.2f} to {max(pairs):.2f})"


def engine_runs(record: Record) -> str:
    return str(len(record["rates"]["W1"]["exeplan"]))


def engine_same(record: Record) -> str:
    return f"{min(float(row[4].split()[0]) for row in record['rows']):g} %"


def _peer_rows(record: Record) -> list[Record]:
    return [row for row in record["rows"] if row["requests"] == 10000]


def replay_times(record: Record) -> str:
    return rows(
        ("stages", "passes", "exeplan", "slowest run", "vidur", "fastest run", "vidur over exeplan"),
        [
            (
                str(row["stages"]),
                count(row["passes"]),
                f"{row['ms a request']:.3f} ms",
                f"{row['most here']:.3f} ms",
                f"{row[_PEER]:.3f} ms",
                f"{row['least there']:.3f} ms",
                f"{row['times']:.1f} times",
            )
            for row in _peer_rows(record)
        ],
    )


_PEER = "peer's ms a request"


def replay_differences(record: Record) -> str:
    found = [abs(row["peer's simulated seconds"] / row["simulated seconds"] - 1) for row in _peer_rows(record)]
    return " and ".join(percent(share) for share in found)


def long_replay(record: Record) -> str:
    row = record["rows"][0]
    return (
        f"{row['CPU seconds']:.0f} CPU seconds, {row['ms a request']:.3f} ms each; {row['wall seconds']:.0f} s of wall "
        f"time; peak memory {row['peak MiB'] / 1024:.1f} GiB, {row['bytes a request']} bytes a request"
    )


def answers(record: Record) -> str:
    """Answers after kills: equal to those of an undisturbed run, ended with an error, and anything else."""
    found: Counter[str] = Counter()
    for plan in record["plans"]:
        found.update(plan["answers"])
    again = found.pop("not let in (503)", 0)
    total = sum(found.values())
    equal, errors = found["as undisturbed"], found["clear error after a second crash"]
    other = total - equal - errors
    return (
        f"{share_of(equal, total)} answers equal an undisturbed run, {errors} ended with a clear error after a second "
        f"crash, {other} ({span(*wilson(other, total), percent)}) otherwise; {again} more were told 503 and sent again"
    )


def well_again(record: Record) -> str:
    """Seconds to the first new token after a kill, by plan and signal."""
    return rows(
        ("killed", "signal", "median", "p99", "worst"),
        [
            (plan["plan"], kind, secs(found["median"]), _p99_of(found), secs(found["worst"]))
            for plan in record["plans"]
            for kind in ("SIGKILL", "SIGSTOP")
            if (found := plan[f"well again after {kind}, s"])
        ],
    )


def _p99_of(found: Mapping[str, float]) -> str:
    """Of fewer than a hundred it is the worst, which stands beside it."""
    return secs(found["p99"]) if found.get("p99", found["worst"]) < found["worst"] else "-"


def left_behind(record: Record) -> str:
    ends = [plan[f"left after {end}"] for plan in record["plans"] for end in ("SIGTERM", "SIGKILL")]
    return str(sum(sum(end.values()) for end in ends))


def slowest(name: str) -> Callable[[Record], str]:
    def made(record: Record) -> str:
        return f"{secs(record[f'{name}, median s'])} in the median, {secs(record[f'{name}, most s'])} at most"

    return made


def longest_gaps(record: Record) -> str:
    gaps = [replan["gap_s"] for replan in record["replans"]]
    return f"{middle(gaps, secs)} in the median, {secs(max(gaps))} at most"


def recomputed(record: Record) -> str:
    return f"{sum(replan['recomputed'] for replan in record['replans'])} of {sum(record['answers'].values()):,}"


def replan_answers(record: Record) -> str:
    return share_of(record["answers"]["as undisturbed"], sum(record["answers"].values()))


def server_errors(record: Record) -> str:
    statuses = [n for key, n in record.items() if key.startswith("answers:") and key.split(": ")[1].isdigit()]
    return f"{share_of(record['5xx'], sum(statuses))} answers had a status of 500 or more"


def unanswered(record: Record) -> str:
    return str(record["answers: raw: left without an answer"])


def memory(record: Record) -> str:
    return f"from {record['held before']['MiB']} to {mib(record['held after']['MiB'])}"


def memory_of_turns(record: Record) -> str:
    turns = record["memory MiB, after each turn"]
    return f"{turns[len(turns) // 4]} after a quarter of the time and {mib(turns[-1])} at its end"


def harm(record: Record) -> str:
    (alone, _), (fuzzed, _) = (record[f"latency {name}, median and p95 s"] for name in ("alone", "fuzzed"))
    later = ", ".join(part["p99 later"] for part in record["parts"])
    whole, decoy = record["p99 later"], record["p99 later than beside the decoy"]
    return (
        f"{signed(fuzzed / alone - 1)} in the median and {whole} in the 99th percentile ({later} in its quarters; "
        f"{decoy} over the same load beside fuzzers of a decoy)"
    )


def slowest_health(record: Record) -> str:
    return secs(record["slowest /health fuzzed s"])


def overload_share(record: Record) -> str:
    accepted = record["answers"]["200"]
    kept = round(record["share of accepted within the bound"] * accepted)
    return f"{percent(kept / accepted)} ({span(*wilson(kept, accepted), percent)}) of {accepted:,}"


def overload_refusals(record: Record) -> str:
    return (
        f"{record['answers']['429']:,} got 429, after {ms(record['429 after, median s'])} in the median and "
        f"{ms(record['429 after, p99 s'])} at the 99th percentile, {ms(record['429 after, most s'])} at most"
    )


def drift_table(record: Record) -> str:
    ways = ("as planned", "re-planned", "hindsight")
    return rows(
        ("trace", "bound", *(f"{way}: in the bound, requests/s" for way in ways), "re-plans"),
        [
            (
                row["trace"],
                secs(row["bound_s"]),
                *(f"{percent(row[way]['last_in_bound'])}, {row[way]['throughput']:.1f}" for way in ways),
                str(len(row["re-planned"]["replans"])),
            )
            for row in record["traces"]
        ],
    )


_BACKLOGS = ("backlog, das, variance 20", "backlog, fcfs, variance 20", "backlog, fcfs, variance 100")


def tcb_backlogs(record: Record) -> str:
    found = record["figures"]
    return rows(
        ("backlog", "slots over padded batches", "slots over turbo", "pure rows over padded batches"),
        [
            (
                name.removeprefix("backlog, "),
                times(found[name]["slots"] / found[name]["naive"]),
                times(found[name]["slots"] / found[name]["turbo"]),
                times(found[name]["concat"] / found[name]["naive"]),
            )
            for name in _BACKLOGS
        ],
    )


def tcb_slots(record: Record) -> str:
    figure = record["figures"]["14"]
    return f"{times(figure['most'])} (the paper: {figure['paper']})"


def tcb_das(record: Record) -> str:
    plain = [row["das_over_best"] for row in record["figures"]["15"]["rows"] if "weights" not in row["setting"]]
    weighted = [row["das_over_best"] for row in record["figures"]["15"]["rows"] if "weights" in row["setting"]]
    return (
        f"{span(min(plain), max(plain), times)} the best of fcfs, sjf and edf over {len(plain)} settings, and "
        f"{times(max(weighted))} where requests have weights"
    )


def tcb_cost(record: Record) -> str:
    shares = [row["share"] for row in record["figures"]["16"]["rows"]]
    return span(min(shares), max(shares), lambda share: percent(share, 2))


_ONE_DEVICE: Mapping[str, Callable[[Record], str]] = {
    **{
        f"{figure}-{name}": errors_of(figure, clock)
        for figure in ("throughput", "latency")
        for name, clock in (("measured", "as measured"), ("even", "at profiling speed"))
    },
    "cases": cases_and_rounds,
    "speed-free": speed_free,
    "rankings": rankings,
    "bounds": bounds_kept,
}

# --- through vLLM -----------------------------------------------------------------------------------------------------


def through_vllm(record: Record) -> str:
    """Plans for vLLM, each with its prediction, its measurement and the best of a grid."""
    header = (
        "workload",
        "bound",
        "max_num_seqs, tokens",
        "requests/s",
        "predicted",
        "latency",
        "predicted",
        "grid's best",
    )
    body = []
    for case in record["cases"]:
        measured, latency, best = case["measured req/s"], case["measured s"], case["grid req/s"]
        body.append(
            (
                case["workload"],
                secs(case["bound, s"]),
                f"{case['max_num_seqs']}, {case['max_num_batched_tokens']}",
                f"{measured:.3g}",
                signed(case["predicted req/s"] / measured - 1),
                secs(latency),
                signed(case["predicted s"] / latency - 1),
                f"{best:.3g}" if best else "none keeps the bound",
            )
        )
    return rows(header, body)


def vllm_plugin(record: Record) -> str:
    """Whether tokens and cadence were as they should be, and the throughputs."""
    own, *held = record["rows"]
    rates = ", ".join(
        f"{row['tokens/s'] / own['tokens/s']:.2f} ({row['schedule'].removeprefix('rra, ')})" for row in held
    )
    return (
        f"all tokens of {record['requests']} greedy requests were those of vLLM {record['vllm']} without it in "
        f"{sum(row['differing'] == 0 for row in held)} of {len(held)} runs, the cadence that of the plan in "
        f"{sum(row['not the cadence'] == 0 for row in held)}; throughput over vLLM's own: {rates}"
    )


def vllm_watch(record: Record) -> str:
    """What the watch did, and what that changed."""
    before, after = (
        record["phases"][f"second workload, {name}"] for name in ("not watched", "watched, after the re-plan")
    )
    alarm = "re-planned" if record["re-planned on the first workload"] else "left alone"
    waited = record["seconds of the second workload until the re-plan"]
    acted = f"re-planned {waited:.0f} s after the second one had come" if waited else "not re-planned on the second one"
    latency = "latency of the p99 length, s"
    return (
        f"{alarm} on the planned lengths, {acted}; under the second lengths {before[latency]:.3g} s and "
        f"{before['requests/s']:.3g} requests/s with the first plan, {after[latency]:.3g} s and "
        f"{after['requests/s']:.3g} requests/s with the new one, where the bound is {record['bound, s']:.3g} s"
    )


def through_vllm_summary(record: Record) -> str:
    """Errors, bounds, and what the grid took."""
    errors = {name: record[f"{name} error"] for name in ("throughput", "latency")}
    planned = record["seconds of the profile"] + sum(case["planning, s"] for case in record["cases"])
    over = [
        case["measured req/s"] / case["grid req/s"]
        for case in record["cases"]
        if case["over the bound"] <= 0 and case["grid req/s"]
    ]
    late = max(case["over the bound"] for case in record["cases"])
    said = "; ".join(
        f"{name} {percent(found['median'])} off in the median, {signed(found['worst'])} at worst"
        for name, found in errors.items()
    )
    ranges = f"{min(over):.2f} to {max(over):.2f}"
    gains = f"{times(median(over))} the throughput of the best of the grid where the bound was kept ({ranges})"
    kept = f"{record['bounds kept']} bounds kept, none exceeded by more than {percent(max(late, 0.0))}"
    minutes = (
        f"the profile and all plans took {planned / 60:.1f} minutes, the grid {record['seconds of the grid'] / 60:.0f}"
    )
    return "; ".join([said, kept, gains, minutes])


def disaggregated_errors(record: Record) -> str:
    """Of all runs; the protocol stands in the page's sentence."""
    errors = {name: percent(value / 100) for name, value in record["errors"]["all"].items()}
    return (
        f"TTFT {errors['TTFT mean']} off in the mean (median {errors['TTFT median']}), TPOT {errors['TPOT mean']} "
        f"({errors['TPOT median']}), {len(record['rows'])} runs"
    )


FIGURES: Mapping[str, Mapping[str, Callable[[Record], str]]] = {
    "planner-policies": {"plans": best_plans},
    "search": {"optima": searched("rows"), "evaluations": evaluations},
    "search-cluster": {"optima": searched("cases"), "evaluations": cluster_evaluations},
    "search-paper": {"whole": searched_of_paper(whole=True), "drawn": searched_of_paper(whole=False)},
    "planner-speed": {"times": planning_times, "repeats": lambda record: str(record["repeats"])},
    "planner-replay-speed-peer": {"times": replay_times, "differences": replay_differences},
    "planner-replay-speed-10m": {"cost": long_replay},
    "closed-form": {"errors": closed_form_errors},
    "planner-risk": {"left-out": risk_left_out, "traces": risk_traces},
    "planner-risk-corrected": {"left-out": risk_corrected, "deployments": risk_by_deployment},
    "fidelity-demo": {**_ONE_DEVICE, "rra": today_measured},
    "fidelity-demo-unseen": _ONE_DEVICE,
    "fidelity-demos": {"errors": demo_errors, "runs": demo_runs},
    "fidelity-workers-demo": {"errors": errors_of_runs("plan", lambda row: f"`{row['case']}`"), "waa": waa_measured},
    "fidelity-rate-demo": {"errors": errors_at_rates, "plans": lambda record: str(len(record["rows"]))},
    "fidelity-replicas": {
        "errors": errors_of_runs("model, engines", lambda row: f"{row['model']}, {row['engines']}"),
        "gains": gains_of_two,
    },
    "traces-demo": {"ratios": trace_ratios, "bounds": trace_bounds},
    "paper": {
        **{f"{part}-gains": if_made(part, paper_gains(part)) for part in ("fig6", "fig8")},
        **{f"{part}-against": if_made(part, paper_against(part)) for part in ("fig6", "fig8")},
        **{part: if_made(part, paper_claims(part), block=True) for part in PAPER_PARTS},
        "today-summary": if_made("today", today_summary),
        "today": if_made("today", today_cases, block=True),
        "stage-times": paper_stage_times,
    },
    "silicon": {"errors": silicon_errors, "picks": silicon_picks},
    "silicon-pooling": {"medians": pooling_medians, "sentence": pooling_sentence},
    "silicon-noise-floor": {"floor": noise_floor, "picks": noise_floor_picks},
    "a100": {stack: a100_errors(stack) for stack in ("distserve", "vllm", "splitwise")},
    "engine-throughput": {"rates": engine_rates, "runs": engine_runs, "same": engine_same},
    "through-vllm": {"cases": through_vllm, "summary": through_vllm_summary},
    "vllm-plugin": {"runs": vllm_plugin},
    "vllm-watch": {"summary": vllm_watch},
    "silicon-servers": {"errors": disaggregated_errors},
    "kills": {
        "kills": lambda record: str(sum(plan["kills"] for plan in record["plans"])),
        "answers": answers,
        "well": well_again,
        "left": left_behind,
    },
    "replans": {
        "answers": replan_answers,
        "recomputed": recomputed,
        "paused": slowest("paused"),
        "gaps": longest_gaps,
    },
    "fuzz": {
        "errors": server_errors,
        "unanswered": unanswered,
        "harm": harm,
        "memory": memory_of_turns,
        "health": slowest_health,
    },
    "overload": {
        "accepted": lambda record: f"{record['accepted requests/s']:.1f} requests/s",
        "promised": lambda record: f"{record['promised requests/s']:.1f}",
        "in-bound": overload_share,
        "mean": lambda record: f"{record['latency of outputs of p99 length, mean s']:.3f} s",
        "refused": overload_refusals,
        "memory": lambda r: (
            f"{r['memory MiB, first third']:.0f} MiB in the first third, {mib(r['memory MiB, last third'])} in the last"
        ),
    },
    "leavers": {
        "clients": lambda record: count(record["clients"]),
        "free": lambda record: secs(record["after the last one left, s"]),
        "memory": memory,
    },
    "drift": {"traces": drift_table},
    "adjusted-plans": {"gains": adjusted_plans, "seeds": lambda record: str(record["seeds"])},
    "two-cores": {"bounds": two_cores, "shared": lambda record: times(record["slower_together"])},
    "equal": {
        "static": equal_requests("static"),
        "single": equal_of_batch(1),
        "largest": equal_of_batch(32),
    },
    "tcb": {"backlogs": tcb_backlogs, "slots": tcb_slots, "das": tcb_das, "cost": tcb_cost},
}
