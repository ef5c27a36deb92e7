"""Mutation score: small faults put into the code, each of which the tests named with it must detect.

    python -m benchmarks.quality.mutants [--only WORD ...] [--processes 2] [--list]

A mutant is one row of MUTANTS: a file, a fragment that occurs there exactly once, what replaces it, what that breaks,
and the test files that must fail. The tree is copied to a temporary directory; the named tests must pass there as it
is, then each mutant is applied alone and its tests run. A mutant is killed when a test fails or does not end within
the time limit, and survives when all pass; anything else, such as tests that cannot be collected, is an error. To
re-target a row after a move or a rename, change its file and its fragment: `--list` says which rows no longer apply.
Writes records/mutants.json; the exit status is 1 where a mutant survives.

Not here: mutants found by chance. Each row stands for a mistake that a person could make.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from benchmarks.lib.record import write_record
from exeplan.planner.reports.tables import table

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT = 600
"""Seconds that the tests of one mutant may take."""


class MutantError(ValueError):
    """A row of MUTANTS that does not fit the tree, or tests that say nothing about it."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file."""

    file: str
    old: str
    """Occurs exactly once in the file."""
    new: str
    breaks: str
    tests: tuple[str, ...]
    """Files that must hold a test that fails."""

    def applied(self, root: Path) -> str:
        """The file's text with the change. Raises MutantError unless `old` occurs there exactly once."""
        path = root / self.file
        if not path.is_file():
            raise MutantError(f"{self.file} does not exist, so '{self.breaks}' cannot be tried; correct the row's file")
        text = path.read_text()
        if (count := text.count(self.old)) != 1:
            raise MutantError(
                f"{self.file} holds {self.old!r} {count} times, so '{self.breaks}' cannot be tried; "
                "correct the row's fragment until it occurs once"
            )
        if missing := [test for test in self.tests if not (root / test).is_file()]:
            raise MutantError(f"no test file {missing[0]} for '{self.breaks}'; correct the row's tests")
        return text.replace(self.old, self.new)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the tests of one mutant said."""

    mutant: Mutant
    killed: bool
    by: str
    """The test that failed, or `time limit`; empty for a survivor."""
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], help="mutants whose file or description holds one of these")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="say which rows apply to the tree, and run nothing")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if not args.only or any(word in f"{m.file} {m.breaks}" for word in args.only)]
    try:
        if args.list:
            return _list(chosen)
        for mutant in chosen:
            mutant.applied(ROOT)
        outcomes = run(chosen, processes=args.processes)
    except MutantError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    _report(outcomes, whole=len(chosen) == len(MUTANTS))
    return 0 if all(outcome.killed for outcome in outcomes) else 1


def _list(mutants: Sequence[Mutant]) -> int:
    wrong = 0
    for mutant in mutants:
        try:
            mutant.applied(ROOT)
            print(f"{mutant.file}: {mutant.breaks}")
        except MutantError as error:
            wrong += 1
            print(f"DOES NOT APPLY: {error}")
    return 2 if wrong else 0


def run(mutants: Sequence[Mutant], *, processes: int) -> list[Outcome]:
    """Each mutant in a copy of the tree. Raises MutantError where a test fails on the unchanged tree."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with _copies(processes) as copies, ThreadPoolExecutor(processes) as pool:
        for test, (status, output) in zip(tests, pool.map(lambda test: _in_a_copy(copies, [test]), tests), strict=True):
            if status != 0:
                raise MutantError(f"{test} does not pass on the unchanged tree:\n{output}")
        return list(pool.map(lambda mutant: _tried(copies, mutant), mutants))


@contextmanager
def _copies(count: int) -> Iterator["SimpleQueue[Path]"]:
    """Copies of the files that git tracks, and of new ones that it does not ignore."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    copies: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for number in range(count):
            root = Path(folder) / str(number)
            for name in filter(None, names):
                if os.path.lexists(ROOT / name):
                    (root / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, root / name, follow_symlinks=False)
            _check_imports(root)
            copies.put(root)
        yield copies


def _check_imports(root: Path) -> None:
    """Raises MutantError where the tests of a copy would test another tree, such as an installed one."""
    command = [sys.executable, "-c", "import exeplan; print(exeplan.__file__)"]
    found = subprocess.run(command, cwd=root, env=_environment(root), capture_output=True, text=True, check=True).stdout
    if not Path(found.strip()).resolve().is_relative_to(root.resolve()):
        raise MutantError(f"tests would import {found.strip()} instead of the copy of the tree in {root}")


def _environment(root: Path) -> dict[str, str]:
    """No bytecode: what is cached for the unchanged file could be taken for the mutant's."""
    return {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def _in_a_copy(copies: "SimpleQueue[Path]", tests: Sequence[str]) -> tuple[int | None, str]:
    root = copies.get()
    try:
        return _tested(root, tests)
    finally:
        copies.put(root)


def _tested(root: Path, tests: Sequence[str]) -> tuple[int | None, str]:
    """Exit status of pytest, None beyond the time limit, and what it printed last."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", *tests]
    process = subprocess.Popen(
        command,
        cwd=root,
        env=_environment(root),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT)
        return process.returncode, output[-3000:]
    except subprocess.TimeoutExpired:
        return None, ""
    finally:  # What a test has started, too, and whatever ended the wait.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _tried(copies: "SimpleQueue[Path]", mutant: Mutant) -> Outcome:
    root, began = copies.get(), time.perf_counter()
    path = root / mutant.file
    original = path.read_text()
    try:
        path.write_text(mutant.applied(root))
        status, output = _tested(root, mutant.tests)
    finally:
        path.write_text(original)
        copies.put(root)
    if status not in (0, 1, None):
        raise MutantError(f"{mutant.file}: the tests of '{mutant.breaks}' end with status {status}:\n{output}")
    outcome = Outcome(mutant, status != 0, _killer(status, output), time.perf_counter() - began)
    print(f"{'killed  ' if outcome.killed else 'SURVIVED'} {mutant.file}: {mutant.breaks}", flush=True)
    return outcome


def _killer(status: int | None, output: str) -> str:
    if status is None:
        return "time limit"
    failed = [line.split()[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0] if status and failed else ""


def _report(outcomes: Sequence[Outcome], *, whole: bool) -> None:
    """The table, and the record where all mutants ran."""
    rows = [
        (o.mutant.file, o.mutant.breaks, "killed" if o.killed else "SURVIVED", f"{o.seconds:.0f} s", o.by)
        for o in outcomes
    ]
    killed = sum(outcome.killed for outcome in outcomes)
    print(f"\n{table(('file', 'what it breaks', 'outcome', 'time', 'by'), rows)}")
    print(f"\n{killed} of {len(outcomes)} mutants killed: {killed / len(outcomes):.0%}")
    if whole:
        found = [{**asdict(o.mutant), "killed": o.killed, "by": o.by, "seconds": round(o.seconds, 1)} for o in outcomes]
        figures = {"score": killed / len(outcomes), "killed": killed, "mutants": len(outcomes), "rows": found}
        print(f"record: {write_record('mutants', figures)}")


COMMUNICATION = "tests/simulator/test_communication_oracle.py"
FORESIGHT = "tests/simulator/test_closed_form_against_replay.py"
COST = "tests/simulator/test_cost.py"
PASSES = "tests/simulator/test_pass_oracle.py"
REPLAY = "tests/simulator/test_replay.py"
ROUTED = "tests/simulator/test_routed.py"
REPLAY_ORACLE = "tests/simulator/test_replay_against_oracle.py"
STEPWISE = "tests/simulator/test_replay_against_stepwise.py"
DAS_ORACLE = "tests/core/test_das_oracle.py"
SEARCH = "tests/search/test_search.py"
POLICIES = "tests/policies/test_policies.py"
DEADLINES = "tests/workload/test_deadlines.py"
SAMPLING = "tests/runner/compute/test_sampling.py"
ON_DEVICE = "tests/runner/compute/test_device_sampling.py"
PROTOCOL = "tests/runner/server/test_protocol.py"

MUTANTS = (
    # Simulator: messages
    Mutant(
        "simulator/placement_timings.py",
        "2 * (size - 1) * (wire.latency",
        "(size - 1) * (wire.latency",
        "ring all-reduce halved",
        (COMMUNICATION,),
    ),
    Mutant(
        "simulator/cost.py",
        "handover_bytes_per_token(self.spec, self.profile.dtype) / min(width, shares)",
        "handover_bytes_per_token(self.spec, self.profile.dtype)",
        "the cost of a KV transfer not divided among devices",
        (COMMUNICATION,),
    ),
    Mutant(
        "simulator/cost.py",
        "self._bytes_per_token * (prompts + rows)",
        "self._bytes_per_token * rows",
        "a pipeline sends no prompt tokens",
        (COMMUNICATION,),
    ),
    Mutant(
        "simulator/passes.py",
        "self._decoder + num_all_reduces(spec) * p.expected(sums)",
        "self._decoder + p.expected(sums)",
        "one all-reduce a layer in the closed form",
        (COMMUNICATION,),
    ),
    Mutant(
        "simulator/replay.py",
        "row.num_tokens - cost.first_token_from_prefill",
        "row.num_tokens",
        "the token of the prefill is transferred too",
        (COMMUNICATION,),
    ),
    # Simulator: passes
    Mutant(
        "simulator/cost.py",
        "if kind.first and self.control:",
        "if self.control:",
        "control paid on every stage",
        ("tests/simulator/test_control.py",),
    ),
    Mutant(
        "simulator/cost.py",
        "self.prefill_overhead.at(prefills) - self.overhead.at(prefills)",
        "self.prefill_overhead.at(prefills)",
        "a pass with prefills pays both overheads",
        (PASSES,),
    ),
    Mutant(
        "simulator/cost.py",
        "max(curve.at(end) - curve.at(start), curve.at(end - start))",
        "curve.at(end - start)",
        "a chunk attends only to itself",
        (PASSES,),
    ),
    Mutant(
        "simulator/passes.py",
        "spread = count if cycle.padded else np.sqrt(count)",
        "spread = count",
        "prompts of a batch are all long or all short",
        (PASSES,),
    ),
    Mutant(
        "simulator/curves.py",
        "(lower + weight * (upper - lower))",
        "lower",
        "the number of sequences rounded down to a measured one",
        (COST,),
    ),
    Mutant(
        "simulator/memory.py",
        "min(stage.tensor_parallel_size, spec.num_kv_shares)",
        "stage.tensor_parallel_size",
        "key/value heads split beyond their number",
        ("tests/simulator/test_memory_oracle.py",),
    ),
    # Simulator: replay and closed form
    Mutant(
        "simulator/replay.py",
        "start = free[number] if free[number] > ready else ready",
        "start = ready",
        "a stage runs two passes at once",
        (REPLAY_ORACLE,),
    ),
    Mutant(
        "simulator/replay.py",
        "bisect_left(rising, until, 1) + 1, 2)",
        "bisect_left(rising, until, 1) + 2, 2)",
        "a pass booked ahead begins after an arrival that would join it",
        ("tests/simulator/test_closed_loop.py",),
    ),
    Mutant(
        "simulator/replay.py",
        "            self._repeating.pipeline.free[0] = ends[-1]\n",
        "",
        "a replica that a request interrupts is busy until it would have been",
        (ROUTED,),
    ),
    Mutant(
        "exeplan/scheduling/router.py",
        "return queues.shortest(turn)",
        "return queues.shortest(0)",
        "of equally short queues the first one gets every request",
        (ROUTED,),
    ),
    Mutant(
        "simulator/rates/at_rate.py",
        "many = (variability + lengths) / (1.0 + lengths)",
        "many = 1.0",
        "every n-th request of a stream counts as a Poisson stream",
        ("tests/planner/test_sharing.py",),
    ),
    Mutant(
        "simulator/closed_form.py",
        "KV_SIGMAS * self.cycle.kv_tokens_std",
        "self.cycle.kv_tokens_std",
        "a plan leaves room for one standard deviation of the KV cache",
        (FORESIGHT,),
    ),
    Mutant(
        "exeplan/planner/problems/replicas.py",
        "max([*options, best[places - 1]], key=lambda use: use.throughput)",
        "max([*options, best[0]], key=lambda use: use.throughput)",
        "no GPU may stay idle where replicas leave one over",
        ("tests/planner/problems/test_replicas.py",),
    ),
    Mutant(
        "exeplan/core/schedule.py",
        "devices=tuple(first_device + device for device in s.devices)",
        "devices=s.devices",
        "every replica is on the first one's devices",
        ("tests/core/test_plan.py",),
    ),
    Mutant(
        "simulator/rates/at_rate.py",
        "return (1 + lengths) / (2 * lengths + (1 - lengths) / alike)",
        "return 1.0",
        "the queue is that of exponential lengths, whatever they are",
        ("tests/simulator/rates/test_at_rate_by_hand.py",),
    ),
    Mutant(
        "exeplan/core/runs/metrics.py",
        "spans / (self.requests.output_tokens[some] - 1)",
        "spans / self.requests.output_tokens[some]",
        "tpot over all tokens instead of the later ones",
        ("tests/core/test_metrics.py",),
    ),
    # Policies: closed forms
    Mutant(
        "exeplan/policies/rra.py",
        "timeline.until_decode + full * cycle + rest,",
        "0.97 * (timeline.until_decode + full * cycle + rest),",
        "RRA's latency 3 % too short",
        (FORESIGHT,),
    ),
    Mutant(
        "exeplan/policies/rra.py",
        "float(occurs @ timeline.rounds[:steps])",
        "float(timeline.rounds[:steps].sum())",
        "RRA runs decode iterations in which no request is left",
        ("tests/policies/test_rra.py",),
    ),
    Mutant(
        "exeplan/policies/orca.py",
        "slots * groups / (steps * round_)",
        "slots * groups / ((steps + 1) * round_)",
        "ORCA's requests take one iteration more",
        (FORESIGHT,),
    ),
    Mutant(
        "exeplan/policies/shared/groups.py",
        "groups / circulate(_drawn(seconds, probability), groups).rate",
        "groups * float(probability @ seconds.max(axis=0).mean(axis=1))",
        "a round is as long as average passes on the slowest stage: no group holds up another",
        (FORESIGHT,),
    ),
    Mutant(
        "exeplan/policies/static.py",
        "still_going @ rounds + last @ tail",
        "still_going @ rounds",
        "static batching does not drain its last pass",
        ("tests/policies/test_static.py",),
    ),
    Mutant(
        "exeplan/policies/chunked.py",
        "own.completed * groups / round_,\n        latency=lambda output_tokens: first + (np",
        "own.completed / round_,\n        latency=lambda output_tokens: first + (np",
        "chunked prefill counts one group of many",
        (FORESIGHT,),
    ),
    Mutant(
        "exeplan/policies/shared/waa_steady.py",
        "float(seen @ states.outside)",
        "0.0",
        "WAA's first decode does not wait for the KV transfer",
        (COMMUNICATION,),
    ),
    Mutant(
        "exeplan/policies/concat.py",
        "rows = (held.shares * number) @",
        "rows = held.shares @",
        "a slot of several requests is one row",
        ("tests/policies/test_concat_slots.py",),
    ),
    Mutant(
        "exeplan/policies/shared/cutting.py",
        "tried[every, best] + overhead",
        "tried[every, best]",
        "TurboBatching cuts batches at no cost",
        ("tests/policies/test_turbo.py",),
    ),
    # Policies: what runs next
    Mutant(
        "exeplan/policies/rra.py",
        '>= schedule["decode_steps"]',
        '> schedule["decode_steps"]',
        "RRA decodes one iteration too many between prefills",
        (POLICIES,),
    ),
    Mutant(
        "exeplan/policies/orca.py",
        ".admissible(free, reserve=True)",
        ".admissible(free)",
        "ORCA admits requests whose longest output does not fit",
        (POLICIES,),
    ),
    Mutant(
        "exeplan/policies/shared/waa.py",
        'return num_prefill_stages * schedule["prefill_batch"]',
        'return (num_prefill_stages - 1) * schedule["prefill_batch"]',
        "WAA prefills one batch less ahead",
        ("tests/policies/test_waa.py",),
    ),
    Mutant(
        "exeplan/policies/chunked.py",
        'schedule["max_num_batched_tokens"] - len(decode)',
        'schedule["max_num_batched_tokens"]',
        "decode rows do not count towards a pass's tokens",
        ("tests/policies/test_chunked.py",),
    ),
    Mutant(
        "exeplan/policies/shared/adjustment.py",
        "tokens + sequence.num_tokens > load * (1 + share)",
        "tokens > load * (1 + share)",
        "an adjusted prefill exceeds its threshold by one prompt",
        ("tests/policies/test_adjustment.py",),
    ),
    # Orders
    Mutant(
        "exeplan/core/queue_order.py",
        "least = das.q * float(",
        "least = float(",
        "DAS's q ignored",
        (DAS_ORACLE,),
    ),
    Mutant(
        "exeplan/core/queue_order.py",
        "-das.q * mean",
        "-mean",
        "DAS's q ignored where requests start one by one",
        (DAS_ORACLE,),
    ),
    Mutant(
        "exeplan/core/queue_order.py",
        "math.ceil(das.eta * count - 1e-9)",
        "math.floor(das.eta * count + 1e-9)",
        "DAS rounds its first part down",
        (DAS_ORACLE,),
    ),
    Mutant(
        "exeplan/core/queue_order.py",
        "size = max(int(queue.tokens[row[:first]].max())",
        "size = max(int(queue.tokens[row].max())",
        "Algorithm 2 cuts slots for every request chosen",
        (DAS_ORACLE,),
    ),
    Mutant(
        "exeplan/core/queue_order.py",
        '"q_percent", 100 - eta)',
        '"q_percent", eta)',
        "q is eta instead of 1 - eta where it is not given",
        (DAS_ORACLE,),
    ),
    # Scheduler
    Mutant(
        "exeplan/scheduling/scheduler.py",
        "for s in reversed(self.running) if not s.in_flight",
        "for s in self.running if not s.in_flight",
        "the oldest request is preempted first",
        (POLICIES, "tests/policies/test_waa.py"),
    ),
    Mutant(
        "exeplan/scheduling/scheduler.py",
        "self.waiting.appendleft(sequence)",
        "self.waiting.append(sequence)",
        "a preempted request goes to the end of the queue",
        (POLICIES, REPLAY, "tests/scheduling/test_scheduler.py"),
    ),
    Mutant(
        "exeplan/scheduling/scheduler.py",
        "num_blocks_for(num_tokens + 1)",
        "num_blocks_for(num_tokens)",
        "a request is admitted without a block for its next token",
        (POLICIES, "tests/scheduling/test_scheduler.py"),
    ),
    Mutant(
        "exeplan/scheduling/sorted_queue.py",
        "for at in (-math.inf, before))",
        "for at in (-math.inf, math.nextafter(before, math.inf)))",
        "a request expires at its deadline instead of after it",
        ("tests/scheduling/test_scheduler.py",),
    ),
    Mutant(
        "exeplan/core/schedule.py",
        'get("lead_ms", 0) / 1000',
        'get("lead_ms", 0) / 1e6',
        "the lead before a deadline is a thousand times too short",
        ("tests/policies/test_concat.py",),
    ),
    Mutant(
        "simulator/lockstep.py",
        "left == 1 or lane.growth(left - 1) <= self.free_blocks",
        "True",
        "passes are booked ahead beyond the free blocks",
        (STEPWISE,),
    ),
    Mutant(
        "exeplan/core/batch.py",
        "heapreplace(shares, (tokens + row.num_tokens,",
        "heapreplace(shares, (tokens + 1,",
        "prefill micro-batches balanced by requests instead of tokens",
        (REPLAY_ORACLE,),
    ),
    Mutant(
        "exeplan/scheduling/takeover.py",
        "            room -= sequence.num_blocks\n",
        "",
        "a new plan keeps more blocks than its cache has",
        ("tests/scheduling/test_takeover.py",),
    ),
    # Search
    Mutant(
        "exeplan/search/grid.py",
        "outcome.latency > self.bound * (1 + slack)",
        "outcome.latency >= self.bound * (1 + slack)",
        "a point on the bound counts as beyond it",
        (SEARCH,),
    ),
    Mutant(
        "exeplan/search/grid.py",
        "rank = (-outcome.throughput, outcome.latency, index)",
        "rank = (-outcome.throughput, -outcome.latency, index)",
        "of equal throughputs the one of most latency wins",
        (SEARCH,),
    ),
    Mutant(
        "exeplan/search/branch_and_bound.py",
        "_turn(low, knob, middle + 1), high)",
        "_turn(low, knob, min(middle + 2, high[knob])), high)",
        "branch and bound skips a value where it splits a box",
        (SEARCH,),
    ),
    Mutant(
        "exeplan/search/branch_and_bound.py",
        "return most * (1 + doubt.slack.throughput)",
        "return most",
        "a box's ceiling ignores how far throughput dips",
        (SEARCH,),
    ),
    Mutant(
        "exeplan/search/search.py",
        "winner[k] + 1, *winner[k + 1 :]",
        "winner[k] - 1, *winner[k + 1 :]",
        "what binds is asked one step below the winner",
        (SEARCH,),
    ),
    Mutant(
        "exeplan/search/line.py",
        "hopeless = ceiling < at_least and",
        "hopeless =",
        "a line that can still win is given up",
        ("tests/search/test_line.py",),
    ),
    Mutant(
        "exeplan/core/bounds.py",
        "other / bound * first for",
        "other * first for",
        "further bounds compared in seconds instead of shares",
        ("tests/core/test_bounds.py",),
    ),
    Mutant(
        "exeplan/planner/problems/layouts.py",
        "(counts[stage] + 1) * loads[stage].layer_seconds",
        "counts[stage] * loads[stage].layer_seconds",
        "layers given to the stage that is fastest before it has one more",
        ("tests/planner/problems/test_layouts.py",),
    ),
    # Sampling
    Mutant(
        "runner/compute/tokens/sampling.py",
        "(logits_V - logits_V.max()) / params.temperature",
        "(logits_V - logits_V.max()) * params.temperature",
        "temperature multiplies the logits",
        (SAMPLING,),
    ),
    Mutant(
        "runner/compute/tokens/sampling.py",
        "tail = (1.0 - top_p) * total",
        "tail = top_p * total",
        "top-p cuts its own share instead of the rest",
        (SAMPLING,),
    ),
    Mutant(
        "runner/compute/tokens/sampling.py",
        "torch.where(values > 0, values / penalty, values * penalty)",
        "values / penalty",
        "a repetition penalty raises negative logits",
        (SAMPLING,),
    ),
    Mutant(
        "runner/compute/tokens/sampling.py",
        "counts * params.frequency_penalty + params.presence_penalty",
        "params.frequency_penalty + params.presence_penalty",
        "a frequency penalty counts once",
        (SAMPLING,),
    ),
    Mutant(
        "runner/compute/tokens/sampling.py",
        "len(row.output_token_ids) < row.sampling.min_tokens",
        "len(row.output_token_ids) <= row.sampling.min_tokens",
        "min_tokens holds for one token more",
        (SAMPLING,),
    ),
    Mutant(
        "runner/compute/tokens/noise.py",
        "+ position * _GOLDEN)",
        "+ _GOLDEN)",
        "all positions of a request draw with the same noise",
        (SAMPLING,),
    ),
    Mutant(
        "runner/compute/tokens/device_sampling.py",
        "1.0 - params.top_p, math.log",
        "params.top_p, math.log",
        "top-p on the device cuts its own share instead of the rest",
        (ON_DEVICE,),
    ),
    Mutant(
        "runner/compute/tokens/device_sampling.py",
        "index_add_(0, place_X, value_X, alpha=-1.0)",
        "index_add_(0, place_X, value_X)",
        "a frequency penalty on the device rewards repetition",
        (ON_DEVICE,),
    ),
    # Protocol
    Mutant(
        "runner/server/openai/fields.py",
        'extra="forbid", frozen',
        'extra="ignore", frozen',
        "an unknown field is accepted and ignored",
        (PROTOCOL,),
    ),
    Mutant(
        "runner/server/openai/fields.py",
        'strict=True, extra="forbid", frozen',
        'extra="forbid", frozen',
        "values are coerced to the type of their field",
        (PROTOCOL,),
    ),
    Mutant(
        "runner/server/openai/json_body.py",
        "len(found) < len(pairs)",
        "len(found) > len(pairs)",
        "a field that is given twice is accepted",
        (PROTOCOL,),
    ),
    Mutant(
        "runner/server/openai/fields.py",
        "type(value) is type(allowed) and value == allowed",
        "value == allowed",
        "best_of=true counts as best_of=1",
        (PROTOCOL,),
    ),
    Mutant(
        "runner/server/openai/completion_request.py",
        "Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS,",
        "Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS + 1,",
        "a batch holds one prompt too many",
        (PROTOCOL,),
    ),
    Mutant(
        "runner/server/openai/chat_request.py",
        "(self.top_logprobs or 0) if self.logprobs else None",
        "self.top_logprobs or None",
        "a chat without alternatives gets no log-probabilities",
        (PROTOCOL,),
    ),
    Mutant(
        "runner/server/openai/completion_request.py",
        "max((count for count in wanted if count is not None), default=None)",
        "max((count for count in wanted if count), default=None)",
        "an echoed prompt with logprobs=0 has no log-probabilities",
        (PROTOCOL,),
    ),
    Mutant(
        "runner/server/openai/generation_request.py",
        "deadline: float | None = Field(None, gt=0,",
        "deadline: float | None = Field(None, ge=0,",
        "a deadline that is over is accepted",
        (PROTOCOL,),
    ),
)


if __name__ == "__main__":
    sys.exit(main())
