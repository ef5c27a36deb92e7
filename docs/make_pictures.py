"""The pictures of the documentation, each from the code or a record of this tree.

    python -m docs.make_pictures [rooms predicted frontier timeline page paper-fig6 ...]

`rooms` reads the imports, `predicted` and `paper-*` read `benchmarks/records`, `frontier` and `timeline` plan from a
datasheet, `page` serves the demo model for a minute and needs Chromium. Writes docs/pictures/*.png.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from docs.paper_pictures import draw_bars, draw_drift, draw_orca
from docs.rooms import ORDER, arrows, room_of

ROOT = Path(__file__).parents[1]
PICTURES = Path(__file__).parent / "pictures"
BLUE, RED, GREY = "#30638e", "#d1495b", "#9aa5b1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=list(MAKERS), default=[name for name in MAKERS if name != "page"])
    PICTURES.mkdir(exist_ok=True)
    for name in parser.parse_args().names:
        MAKERS[name](PICTURES / f"{name}.png")
        print(PICTURES / f"{name}.png")


def room_arrows() -> dict[str, dict[str, int]]:
    """The number of imports from each room to each other room."""
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for module, others in arrows().items():
        for other in others:
            if room_of(module) != room_of(other):
                counts[room_of(module)][room_of(other)] += 1
    return counts


def draw_rooms(path: Path) -> None:
    """Rooms from the ground up, one line a floor; an arc for the imports between two rooms, which all point down."""
    from matplotlib import pyplot
    from matplotlib.patches import FancyArrowPatch

    counts = room_arrows()
    floors = ORDER[1:]  # Every room imports the leaves.
    floor = {room: number for number, rooms in enumerate(floors) for room in rooms}
    figure, axes = pyplot.subplots(figsize=(8, 8), layout="constrained")
    for number, rooms in enumerate(floors):
        axes.text(0, number, " · ".join(rooms), ha="right", va="center", fontsize=10, family="monospace")
    pairs: dict[tuple[int, int], int] = defaultdict(int)
    for room, others in counts.items():
        for other, count in others.items():
            if other in floor:
                pairs[floor[room], floor[other]] += count
    for (start, end), count in pairs.items():
        if start != end:
            axes.add_patch(
                FancyArrowPatch(
                    (0.02, start),
                    (0.02, end),
                    connectionstyle="arc3,rad=-0.5" if start > end else "arc3,rad=0.5",
                    arrowstyle="-|>",
                    mutation_scale=7,
                    linewidth=0.4 + 0.12 * min(count, 20),
                    color=BLUE if start > end else RED,
                    alpha=0.55,
                )
            )
    axes.set(xlim=(-3.2, 6.2), ylim=(-1, len(floors)))
    axes.set_axis_off()
    axes.set_title(
        "Rooms; an arc is the imports from a room to one below it (an arc upwards would be red)", fontsize=10
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def predicted_rows(records: Path = ROOT / "benchmarks" / "records") -> list[dict[str, Any]]:
    """Throughput predicted and measured, requests/s, of each case of the fidelity benchmark, with its policy."""
    body = json.loads((records / "fidelity-demo.json").read_text(encoding="utf-8"))
    return [
        {
            "case": row["case"],
            "policy": row["policy"],
            "predicted": row["runs"][0]["replay"]["throughput"],
            "measured": row["runs"][0]["at_profile_speed"]["throughput"],
        }
        for row in body["rows"]
    ]


def draw_predicted(path: Path) -> None:
    """Predicted over measured throughput, a point a case, with the diagonal and 10 % on both sides."""
    from matplotlib import pyplot

    rows = predicted_rows()
    top = 1.1 * max(max(row["predicted"], row["measured"]) for row in rows)
    figure, axes = pyplot.subplots(figsize=(5.5, 5), layout="constrained")
    axes.fill_between([0, top], [0, 0.9 * top], [0, 1.1 * top], color=GREY, alpha=0.25, label="within 10 %")
    axes.plot([0, top], [0, top], color=GREY, linewidth=1)
    for policy in sorted({row["policy"] for row in rows}):
        own = [row for row in rows if row["policy"] == policy]
        axes.plot([r["measured"] for r in own], [r["predicted"] for r in own], "o", label=policy)
    axes.set(
        xlim=(0, top), ylim=(0, top), xlabel="measured requests/s, at profiling speed", ylabel="predicted requests/s"
    )
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def exeplan(*words: str, cwd: Path) -> None:
    """Runs a command of exeplan in a folder; its output is shown only when it fails."""
    command = [sys.executable, "-m", "exeplan", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=_environment())
    if done.returncode:
        raise SystemExit(f"exeplan {' '.join(words)} failed:\n{done.stderr}")


def _environment() -> Mapping[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _planned(folder: Path, *words: str) -> None:
    """`plan.yaml` in the folder: OPT-13B on four A40, by its datasheet."""
    exeplan("profile", "opt-13b", "--datasheet", "a40-48gb", "--cluster", "a40", "-o", "p.json", cwd=folder)
    given = ("--profile", "p.json", "--cluster", "a40", "--gpus", "4", "--workload", "S", "--latency-bound", "11.5s")
    exeplan("optimize", *given, "-o", "plan.yaml", *words, cwd=folder)


def draw_frontier(path: Path) -> None:
    """As `exeplan optimize --plot` draws it."""
    with tempfile.TemporaryDirectory() as folder:
        _planned(Path(folder), "--plot", str(path))


def draw_timeline(path: Path) -> None:
    """As `exeplan simulate --timeline` draws it, for `rra`: one prefill, then a run of decode iterations."""
    with tempfile.TemporaryDirectory() as folder:
        _planned(Path(folder), "--policy", "rra")
        exeplan("simulate", "plan.yaml", "--timeline", str(path), cwd=Path(folder))


def draw_page(path: Path) -> None:
    """The page of a server that plays its own workload, as Chromium shows it."""
    port = "8791"
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as cleanup:
        folder = Path(name)
        exeplan("profile", "demo", "-o", "p.json", "--budget", "40s", cwd=folder)
        given = ("--profile", "p.json", "--workload", "alpaca", "--latency-bound", "3s")
        exeplan("optimize", *given, "-o", "plan.yaml", cwd=folder)
        serve = [sys.executable, "-m", "exeplan", "serve", "plan.yaml", "--port", port, "--weights", "dummy"]
        server = subprocess.Popen(serve, cwd=folder, env=_environment(), stdout=subprocess.PIPE, text=True)
        cleanup.callback(server.wait)
        cleanup.callback(server.terminate)
        assert server.stdout
        server.stdout.readline()
        load = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "exeplan",
                "bench",
                "plan.yaml",
                "--url",
                f"http://127.0.0.1:{port}",
                "--concurrency",
                "24",
            ],
            cwd=folder,
            env=_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        cleanup.callback(load.wait)
        cleanup.callback(load.terminate)
        time.sleep(40)
        shot = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1280,1150", "--timeout=8000"]
        subprocess.run(["chromium", *shot, f"--screenshot={path}", f"http://127.0.0.1:{port}/"], check=True)


MAKERS: Mapping[str, Callable[[Path], None]] = {
    "rooms": draw_rooms,
    "predicted": draw_predicted,
    "frontier": draw_frontier,
    "timeline": draw_timeline,
    "page": draw_page,
    "paper-fig6": partial(draw_bars, "fig6", columns=3),
    "paper-fig7": partial(draw_bars, "fig7", columns=3),
    "paper-fig8": partial(draw_bars, "fig8", columns=3),
    "paper-fig10": partial(draw_bars, "fig10", columns=3),
    "paper-fig11": draw_drift,
    "paper-orca10": draw_orca,
    "paper-orca11": partial(draw_orca, part="orca11"),
}

if __name__ == "__main__":
    main()
