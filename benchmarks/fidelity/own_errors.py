"""Errors of predictions for exeplan's own engine, from the records of its fidelity, as `--risk` takes them.

    python -m benchmarks.fidelity.own_errors

Writes plans/errors/cpu-demo.yaml from the records fidelity-demo and fidelity-workers-demo: measured over replayed, as
measured, on a machine whose speed moves. Pipelines and workers of one phase count as tensor parallel size 1.
"""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np

from benchmarks.lib.record import RECORDS
from benchmarks.planner.risk import deployments_yaml
from exeplan.planner.margins.deployments import Deployment, errors_of

FILE = Path(__file__).parents[2] / "plans" / "errors" / "cpu-demo.yaml"
_HEAD = """\
# exeplan's own engine on one CPU. Errors: logarithms of measured / replayed, percent: [runs, mean, spread above it].
# Measured: benchmarks/records/fidelity-demo.json and fidelity-workers-demo.json (this project, Apache-2.0).
# Written by: python -m benchmarks.fidelity.own_errors
"""


def main() -> None:
    FILE.write_text(own_errors())
    print(FILE.read_text())


def own_errors() -> str:
    """The file's text."""
    ratios: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    device = ""
    for name in ("fidelity-demo", "fidelity-workers-demo"):
        record = json.loads((RECORDS / f"{name}.json").read_text())
        device = record["hardware"]["cpu"]
        for row in record["rows"]:
            size = 2 if row["case"].startswith("TP 2") else 1
            for run in row["runs"]:
                for quantity in ("latency", "ttft", "tpot"):
                    measured, replayed = run["measured"].get(quantity), run["replay"].get(quantity)
                    if measured and replayed:
                        ratios[size][quantity].append(measured / replayed)
    found = [
        Deployment(
            kind="measured",
            engine="exeplan",
            device=device,
            model="demo",
            dtype="float32",
            tensor_parallel_size=size,
            errors={quantity: errors_of(np.log(values).tolist()) for quantity, values in of_size.items()},
        )
        for size, of_size in sorted(ratios.items())
    ]
    return _HEAD + deployments_yaml(found)


if __name__ == "__main__":
    main()
