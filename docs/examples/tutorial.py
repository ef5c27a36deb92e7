"""The tutorial as a script: plan OPT-13B for one A40 under a latency bound, without a GPU.

    python docs/examples/tutorial.py [FOLDER]

Writes frontier.png, timeline.png and plan.yaml to FOLDER (default: here).
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import exeplan

folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")

# 1. Traffic: arrays, a DataFrame, a trace file, a shipped name or a law in text.
rng = np.random.default_rng(0)
workload = exeplan.load_workload(
    input_tokens=rng.integers(100, 400, size=2000),
    output_tokens=np.minimum(rng.geometric(1 / 120, size=2000), 600),
    name="chat",
)
print(workload)

# 2. Times: from a datasheet here, from `exeplan profile` where the device is at hand.
profile = exeplan.datasheet_profile("opt-13b", "a40-48gb")

# 3. The schedule with the most throughput whose 99th-percentile output takes at most 40 seconds.
solution = exeplan.optimize(profile, workload, latency_bound="40s")
print(solution)
print(solution.to_frame())

# 4. What the bound costs: throughput over latency, by policy, on axes of yours.
figure = Figure(figsize=(7, 4), layout="constrained")
solution.plot(ax=figure.subplots())
figure.savefig(folder / "frontier.png", dpi=120)

# 5. A bound that cannot be kept is an exception with the reason and the nearest possible.
try:
    exeplan.optimize(profile, workload, latency_bound="20s")
except exeplan.Infeasible as error:
    print(f"infeasible: {error}")

# 6. The plan, request by request.
simulation = exeplan.simulate(solution.plan, profile=profile, workload=workload)
print(simulation)
figure = Figure(figsize=(9, 4), layout="constrained")
simulation.plot(ax=figure.subplots())
figure.savefig(folder / "timeline.png", dpi=120)

# 7. Several bounds at once, as a table.
comparison = exeplan.compare([profile], [workload], ["32s", "40s", "60s"])
print(comparison)

# 8. The plan as a file, for `exeplan simulate`, `exeplan serve` or `exeplan.load_plan`.
exeplan.save_profile(profile, folder / "opt-13b.json")
exeplan.save_plan(solution.plan, folder / "plan.yaml")
assert exeplan.load_plan(folder / "plan.yaml").schedule == solution.plan.schedule
