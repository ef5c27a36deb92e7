"""The runs of the drift benchmark on a simulated device: the real engine and scheduler with predicted batch times.

This separates the effect of re-planning from the noise of the machine, and takes a fraction of the time. `slowdown`
multiplies every batch time, as if the profile were too fast.
"""

from collections.abc import Sequence

import numpy as np

from benchmarks.drift.figures import AHEAD, Served
from exeplan.core.batch import BLOCK_SIZE, Batch
from exeplan.core.models.model import ModelSpec
from exeplan.core.plan import Plan
from exeplan.core.profile import ReferencePass
from exeplan.drift.state import Rules
from exeplan.drift.watch import Watch
from exeplan.planner.load_problem import plan_problem
from exeplan.runner.compute.kv_budget import KVBudget
from exeplan.runner.compute.tokens.sampling import SampledToken, SamplingParams
from exeplan.runner.engine.engine import Engine, Request
from exeplan.runner.engine.executor import BatchDone, sampled_requests
from exeplan.runner.engine.kv_regions import KVRegion
from exeplan.simulator.cost import CostModel
from exeplan.workload.workload import Trace


class PredictedDevice:
    """An executor of one stage that computes nothing; `now` is its clock."""

    phases: tuple[str, ...] = ("",)
    num_prefill_stages = num_decode_stages = 1
    async_scheduling = False
    kv_budget: KVBudget | None = None

    def __init__(self, spec: ModelSpec, cost: CostModel, slowdown: float) -> None:
        self.spec, self._cost, self._slowdown = spec, cost, slowdown
        self.now = 0.0
        self._batch: Batch | None = None

    @property
    def pending(self) -> bool:
        return self._batch is not None

    def accepts(self, phase: str) -> bool:
        return self._batch is None

    def start(self, batch: Batch) -> None:
        self._batch = batch

    def results(self) -> Sequence[BatchDone]:
        batch, self._batch = self._batch, None
        assert batch is not None
        self.now += self._slowdown * sum(self._cost.stage_seconds(batch))
        token = SampledToken(token_id=7, logprob=None, top_logprobs=())
        return (BatchDone(batch, {row.request_id: token for row in sampled_requests(batch, self.spec)}),)

    def wake(self) -> None:
        """No thread waits for this executor."""

    def release(self, request_id: str) -> None:
        """No state is held."""

    def reference_passes(self, passes: Sequence[ReferencePass]) -> None:
        """Its speed is known."""

    def save(self, path: str, regions: Sequence[KVRegion]) -> Sequence[int]:
        raise AssertionError("a predicted device keeps no keys and values")

    def restore(self, path: str, regions: Sequence[KVRegion]) -> None:
        raise AssertionError("a predicted device keeps no keys and values")

    def restart(self) -> None:
        raise AssertionError("a predicted device has no workers to restart")

    def close(self) -> None:
        """No process or memory to release."""


def play_predicted(
    plan: Plan, trace: Trace, *, rules: Rules | None, slowdown: float = 1.0
) -> tuple[list[Served], list[tuple[float, str, str]]]:
    """The requests with their times, and the re-plans; no re-plans without rules."""
    problem = plan_problem(plan)
    spec = problem.profile.model
    device = PredictedDevice(spec, problem.cost, slowdown)
    num_blocks = (plan.kv_cache_tokens or 8 * spec.max_context) // BLOCK_SIZE
    engine = Engine(device, plan.schedule, num_blocks=num_blocks, clock=lambda: device.now)
    watch = Watch(plan, problem, rules=rules) if rules else None
    served: list[Served] = []
    replans: list[tuple[float, str, str]] = []
    added, look = 0, rules.every if rules else np.inf
    while len(served) < len(trace.inputs):
        while added < len(trace.inputs) and engine.num_waiting < AHEAD:
            sampling = SamplingParams(temperature=0.0, max_tokens=int(trace.outputs[added]), ignore_eos=True)
            engine.add(
                Request(request_id=str(added), prompt_token_ids=[7] * int(trace.inputs[added]), sampling=sampling)
            )
            added += 1
        for output in engine.step():
            if output.finish_reason:
                served.append(Served(output.start, output.time))
        if watch and device.now >= look:
            look = device.now + watch.rules.every
            stats = engine.length_stats()
            watch.note(stats.left, stats.running)
            _, proposal = watch.look(device.now)
            if proposal:
                engine.switch_plan(proposal.plan.schedule)
                watch.adopted(proposal, now=device.now)
                replans.append((round(device.now, 1), str(proposal.plan.schedule), proposal.reason))
    return served, replans
