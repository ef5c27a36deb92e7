"""Pipelines: the candidates on pipelines of every size, their replays, and which division of a cluster is best by them.

A pipeline is replayed where the best division uses it, or where the closed form's error may hide that a better division
would (`ranking.py`). Where a replay breaks a bound, the search is repeated under bounds tightened by the overshoot.

Not here: the loop that decides what is replayed next (`optimize.py`), and the search of one pipeline (`candidates.py`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from exeplan.core.bounds import Bound, binding, scaled, utilizations
from exeplan.core.plan import Plan
from exeplan.core.schedule import ROUTERS, Estimate, Placement, ReplicaGroup, Schedule, num_ranks
from exeplan.errors import Infeasible
from exeplan.planner.choice.adjusting import adjusted_schedules, may_gain
from exeplan.planner.choice.candidates import (
    Candidate,
    Key,
    Known,
    candidate,
    candidates,
    not_searched,
    reached,
    sustained,
)
from exeplan.planner.choice.exhaustive import search_progress
from exeplan.planner.choice.infeasible import burst, too_slow, too_tight, wider_bounds
from exeplan.planner.choice.search_space import Outcomes
from exeplan.planner.choice.seeded_replays import MOST_ADDED, Replays
from exeplan.planner.margins.margins import Margins, Risk, expected_margins, margins
from exeplan.planner.problems.headroom import with_headroom
from exeplan.planner.problems.problem import Problem
from exeplan.planner.problems.ranking import MOST_SEEDS, Order, behind, mean_estimate
from exeplan.planner.problems.replays import (
    FullBatches,
    full_batches,
    kv_cache_tokens,
    too_short,
    traced,
)
from exeplan.planner.problems.replicas import (
    Division,
    GroupFigures,
    best_division,
    division_throughput,
    first_devices,
    num_replicas,
    pipeline_sizes,
    together,
)
from exeplan.progress import Told
from exeplan.search.search import Result
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.run import Run
from exeplan.units import show_bytes, show_seconds

_RETRIES = 8
"""Searches under tightened bounds, of one policy on pipelines of one size."""
_FIRST_SLACK = 0.001
"""What the first of them leaves between the bound and the replay, beyond the overshoot: where passes are bound by the
weights, 1 % of latency is worth 10 % of throughput."""
_DOUBT = 0.05
"""How much better than its closed form a replay may be; nearly all are within half of it."""
_ADJUSTED_SEEDS = 3
"""Replays of an adjusted schedule."""
_MISJUDGED, _GIVEN_UP = 1.1, 2
"""Replay over closed form in latency, or closed form over replay in throughput, from which another variant is looked
at; and how many are given up at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What a search may leave out to be quick; by default nothing."""

    rivals: float = 0.0
    """On one device, a policy with less than this share of the throughput of those before it need not be found."""
    largest: int | None = None
    """GPUs of the largest pipelines that are searched; None for all."""
    num_requests: int | None = None
    """Of each replay; None for as many as a steady state needs."""
    close_ones: bool = True
    """Replay also what the closed form may have put behind the winner by its error, and with further seeds."""
    headroom: bool = True
    """Compute the plan's headroom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The winner as a plan, the best of every policy, and the replay of the winner's first replica by the first
    seed."""

    plan: Plan
    candidates: tuple[Candidate, ...]
    beyond: tuple[str, ...]
    """Where the winner's estimate left the measured range."""
    unproven: tuple[str, ...]
    """Why replays are too short to prove the plan; empty where they are not."""
    run: Run
    order: Order | None
    """Against the next best division; None where no other was replayed."""
    full: FullBatches | None = None
    """With an arrival rate, at which batches are seldom full; None under a backlog, where they always are."""
    groups: tuple[GroupFigures, ...] = ()
    """Of unequal replicas the figures of each; empty where all are equal."""
    seeds: tuple[Estimate, ...] = ()
    """Replays of the whole plan, by seed; its `replay` is their mean, and what `replayed` of its policy counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proof:
    """Replays of a candidate by seed, which keep all bounds in the mean; at a rate of all its replicas, `run` is of the
    first one."""

    run: Run
    replays: tuple[Estimate, ...]
    margin: Margins | None

    @property
    def replayed(self) -> Estimate:
        return mean_estimate(self.replays)


class Pipelines:
    """The candidates on pipelines of every size, and the replays of those that were most promising."""

    def __init__(
        self,
        problem: Problem,
        policies: tuple[str, ...],
        *,
        method: str,
        seed: int,
        risk: Risk | None,
        known: Known | None,
        effort: Effort,
        told: Told,
    ) -> None:
        self.problem, self.method, self.seed, self.risk, self.effort = problem, method, seed, risk, effort
        self.margin = expected_margins(problem, risk) if risk else None
        self.policies = policies
        self.parts = _parts(problem, effort.largest)
        self.held = held = tuple(_held(problem, self.margin))
        tight = {size: part.held_to(held) for size, part in self.parts.items()}
        progress = search_progress(problem, tight, policies, method, told)
        self.outcomes = Outcomes()
        self.found = candidates(
            problem.held_to(held),
            tight,
            policies,
            method,
            known=known,
            outcomes=self.outcomes,
            rivals=effort.rivals,
            progress=progress,
        )
        for size in sorted({size for size, _ in self.found}):
            if size not in self.parts:
                self.parts[size] = problem.part(size, replicas=self._count(size))
            for policy in policies:
                self.found.setdefault((size, policy), not_searched(policy))
        self.limits: dict[Key, tuple[Bound, ...]] = dict.fromkeys(self.found, held)
        self.proofs: dict[Key, _Proof] = {}
        self.replays = Replays(problem, seed=seed, num_requests=effort.num_requests, further=effort.close_ones)
        self.added_requests = 0
        """Replayed with further seeds, to make an order certain."""
        self.given_up: dict[Key, list[tuple[Placement, Schedule]]] = {}
        self.shelved: dict[Key, tuple[Candidate, _Proof]] = {}
        """Proved variants of which the closed form promised far more, while another one is looked at."""
        self.tries: Counter[Key] = Counter()
        self.broken: list[tuple[Schedule, Estimate]] = []
        """Schedules whose replay broke a bound."""

    def score(self, key: Key) -> float:
        """Requests/s of one pipeline: by its replay where it has one, else by the closed form, at most as tried.

        At a rate a replay has just that throughput; the closed form then says what would be sustained.
        """
        if key in self.proofs and not self.problem.arrivals:
            return self.proofs[key].replayed.throughput
        return sustained(self.found[key])

    def best(
        self, policies: Iterable[str] | None = None, *, without: Key | None = None, doubt: float = 0.0
    ) -> dict[int, tuple[str, int]]:
        """The best division by now: the policy and the number of replicas by the size of each; empty for none.

        It is the best one `without` a pipeline, where what was not replayed is better than estimated by the `doubt`.
        """
        names = tuple(policies or self.policies)
        best = {
            size: max(
                (0.0 if (size, name) == without else self._hoped((size, name), doubt), -number, name)
                for number, name in enumerate(names)
            )
            for size in self.parts
        }
        scores = {size: score for size, (score, _, _) in best.items() if score > 0}
        return {size: (best[size][2], count) for size, count in self._division(scores).items()}

    def _division(self, scores: Mapping[int, float]) -> Division:
        if self.problem.one_pipeline or self.problem.arrivals:
            most = max(scores, key=lambda size: (self._count(size) * scores[size], size), default=None)
            return {} if most is None else {most: self._count(most)}
        return best_division(scores, self.problem.cluster)

    def _count(self, size: int) -> int:
        """Equal replicas of this size."""
        return 1 if self.problem.one_pipeline else num_replicas(self.problem.cluster, size)

    def throughput(self, division: Mapping[int, tuple[str, int]]) -> float:
        """Requests/s of all replicas."""
        scores = {size: self.score((size, policy)) for size, (policy, _) in division.items()}
        return division_throughput(scores, {size: count for size, (_, count) in division.items()})

    def _hoped(self, key: Key, doubt: float) -> float:
        return self.score(key) * (1.0 if key in self.proofs else 1 + doubt)

    def undecided(self, division: Mapping[int, tuple[str, int]]) -> Key | None:
        """The pipeline whose replay, or whose replay with one seed more, decides next whether a division is the best.

        First those of the division itself, then those of the next best ones, as far as the closed form's error may hide
        that they are better; then those of which more seeds tell which is better.
        """
        if unproved := [key for key in _keys(division) if key not in self.proofs]:
            return max(unproved, key=lambda key: division[key[0]][1] * self.score(key))
        if self.problem.arrivals or not self.effort.close_ones:
            return None
        most = self.throughput(division)
        for rival in self._rivals(division):
            unproved = [key for key in _keys(rival) if key not in self.proofs]
            if unproved and self._hoped_throughput(rival) > most:
                return max(unproved, key=lambda key: rival[key[0]][1] * self.score(key))
        order = self.order(division)
        if order is None or order[0].certain or order[0].alike:
            return None
        if order[0].behind > _DOUBT or order[0].num_seeds >= MOST_SEEDS:
            return None
        pair = [key for key in {*_keys(division), *_keys(order[1])} if self._num_seeds(key) == order[0].num_seeds]
        return min(pair) if self.added_requests < MOST_ADDED else None

    def _rivals(self, division: Mapping[int, tuple[str, int]]) -> list[dict[int, tuple[str, int]]]:
        """The best divisions without one of its pipelines."""
        found = [self.best(without=key, doubt=_DOUBT) for key in _keys(division)]
        return sorted((rival for rival in found if rival), key=lambda rival: -self._hoped_throughput(rival))

    def _hoped_throughput(self, division: Mapping[int, tuple[str, int]]) -> float:
        return sum(count * self._hoped((size, policy), _DOUBT) for size, (policy, count) in division.items())

    def order(self, division: Mapping[int, tuple[str, int]]) -> tuple[Order, dict[int, tuple[str, int]]] | None:
        """How a division compares with the next best one that was replayed whole, and that one; None without one."""
        found = [self.best(without=key) for key in _keys(division)]
        rivals = [rival for rival in found if rival and all(key in self.proofs for key in _keys(rival))]
        if not rivals:
            return None
        other = max(rivals, key=self.throughput)
        num_seeds = min(self._num_seeds(key) for key in (*_keys(division), *_keys(other)))
        less, interval = behind(self._of_seeds(division, num_seeds), self._of_seeds(other, num_seeds))
        name = " and ".join(str(self.found[key].schedule) for key in _keys(other))
        return Order(runner_up=name, behind=less, interval=interval, num_seeds=num_seeds), other

    def _num_seeds(self, key: Key) -> int:
        return len(self.proofs[key].replays)

    def _of_seeds(self, division: Mapping[int, tuple[str, int]], num_seeds: int) -> list[float]:
        """Requests/s of all replicas, by seed."""
        found = [(division[key[0]][1], self.proofs[key].replays) for key in _keys(division)]
        return [sum(count * replays[seed].throughput for count, replays in found) for seed in range(num_seeds)]

    def replay(self, key: Key) -> None:
        """Replays a candidate: it is proved, or searched again under tighter bounds, or given up.

        One that is proved is replayed with another seed.
        """
        if key in self.proofs:
            self._replay_again(key)
            return
        self._replay_first(key)
        if self.found[key].schedule is None and (before := self.shelved.pop(key, None)):
            self.found[key], self.proofs[key] = before

    def _replay_first(self, key: Key) -> None:
        winner, (size, _) = self.found[key], key
        assert winner.schedule is not None
        assert winner.placement is not None
        part = self.parts[size]
        placed = _at(part, winner.placement)
        assert winner.estimate is not None
        run, replays = self.replays.of(placed, winner.schedule, winner.estimate, replicas=self._count(size))
        proof = _Proof(run=run, replays=replays, margin=self.margin)
        if self.risk:
            try:
                own = margins(placed, winner.schedule, self.risk, seed=self.seed)
            except Infeasible as error:
                self.found[key] = replace(winner, schedule=None, refusal=str(error))
                return
            proof = replace(proof, margin=own)
        if max(_filled(part, winner, proof)) <= 1:
            self._prove(key, proof)
        else:
            self._disprove(key, proof)

    def _disprove(self, key: Key, proof: _Proof) -> None:
        """Adjusts the candidate, searches again, or gives it up: its replays break a bound."""
        if self._adjust(key, proof):
            return
        winner, replayed = self.found[key], proof.replayed
        assert winner.schedule is not None
        self.broken.append((winner.schedule, replayed))
        self.tries[key] += 1
        if self.tries[key] >= _RETRIES:
            self.found[key] = replace(winner, schedule=None, refusal=f"{winner.policy} breaks a bound in its replays")
            return
        self._search_again(key, _filled(self.parts[key[0]], winner, proof), replayed)

    def _prove(self, key: Key, proof: _Proof) -> None:
        """Keeps the better of this proof and the one that another variant had; looks for another variant where the
        closed form promised far more than was replayed."""
        just, misjudged = self.found[key], self._promised_more(key, proof) or self._tightened_ranks(key)
        best = just, proof
        before = self.shelved.pop(key, None)
        if before and before[1].replayed.throughput >= proof.replayed.throughput:
            best = before
        if misjudged and (again := self._another_variant(key, at_least=best[1].replayed.throughput)):
            self.shelved[key], self.found[key] = best, again
            return
        self.found[key], self.proofs[key] = best
        self._adjust(key, self.proofs[key])

    def _adjust(self, key: Key, proof: _Proof) -> bool:
        """Replaces a schedule by an adjusted one that keeps the bounds and serves certainly more, if there is one; the
        place of one that breaks them any takes that keeps them, as the closed form has found no better.

        By replays of the same requests, several seeds: bisected for the most throughput, as larger prefills take
        longer.
        """
        winner = self.found[key]
        if self.risk or not may_gain(self.problem, key[1]):
            return False
        assert winner.schedule is not None
        assert winner.placement is not None
        placed, taken = _at(self.parts[key[0]], winner.placement), None
        schedules = adjusted_schedules(placed, winner.schedule)
        low, high = 0, len(schedules)
        while low < high:
            middle = (low + high) // 2
            if kept := self._kept(placed, schedules[middle]):
                high, taken = middle, (schedules[middle], kept)
            else:
                low = middle + 1
        if taken is None:
            return False
        schedule, (run, replays) = taken
        if key in self.proofs and not self._gains(placed, winner.schedule, replays):
            return False
        self.found[key] = replace(winner, schedule=schedule, estimate=placed.estimate(schedule))
        self.proofs[key] = replace(proof, run=run, replays=replays)
        return True

    def _kept(self, placed: Problem, schedule: Schedule) -> tuple[Run, tuple[Estimate, ...]] | None:
        """The first replay of a schedule, and Estimates of all seeds; None where the first or their mean breaks a
        bound."""
        run, first = self.replays.alone(placed, schedule)
        if not self._keep([first]):
            return None
        others = (self.replays.alone(placed, schedule, more=more)[1] for more in range(1, _ADJUSTED_SEEDS))
        replays = first, *others
        return (run, replays) if self._keep(replays) else None

    def _keep(self, replays: Sequence[Estimate]) -> bool:
        """Whether the mean of replays keeps all bounds."""
        return max(utilizations(self.problem.bounds, mean_estimate(replays))) <= 1

    def _gains(self, placed: Problem, schedule: Schedule, replays: Sequence[Estimate]) -> bool:
        """Whether replays, by seed, serve certainly more than those of the schedule."""
        before = [self.replays.alone(placed, schedule, more=more)[1].throughput for more in range(len(replays))]
        gain, interval = behind([one.throughput for one in replays], before)
        return gain > interval

    def _promised_more(self, key: Key, proof: _Proof) -> bool:
        return not self.problem.arrivals and sustained(self.found[key]) > _MISJUDGED * proof.replayed.throughput

    def _tightened_ranks(self, key: Key) -> bool:
        """Whether the bounds were tightened for a placement whose ranks the closed form knows less well: one without
        ranks may be better then."""
        placement = self.found[key].placement
        return not self.problem.arrivals and placement is not None and num_ranks(placement) > 1 and self.tries[key] > 0

    def _another_variant(self, key: Key, *, at_least: float = 0.0) -> Candidate | None:
        """The best of a policy's variants that were not tried; None where there is none, or several were given up."""
        winner, given_up = self.found[key], self.given_up.get(key, [])
        assert winner.placement is not None
        assert winner.schedule is not None
        if self.problem.cluster is None or len(given_up) >= _GIVEN_UP:
            return None
        part, others = self.parts[key[0]].held_to(self.held), [*given_up, (winner.placement, winner.schedule)]
        again = candidate(part, key[1], self.method, winner.search, at_least=at_least, without=others)
        if again.schedule is None or sustained(again) <= at_least:
            return None
        # The bounds were tightened for the variant that is given up.
        self.given_up[key], self.limits[key] = others, self.held
        return again

    def _replay_again(self, key: Key) -> None:
        """One more of its replays, by another seed; it is no longer proved where their mean breaks a bound."""
        found, proof = self.found[key], self.proofs[key]
        assert found.schedule is not None
        assert found.placement is not None
        placed = _at(self.parts[key[0]], found.placement)
        run, replayed = self.replays.alone(placed, found.schedule, more=len(proof.replays))
        self.added_requests += len(run.requests)
        self.proofs[key] = proof = replace(proof, replays=(*proof.replays, replayed))
        if max(utilizations(self.problem.bounds, proof.replayed)) > 1:
            del self.proofs[key]
            self._disprove(key, proof)

    def _search_again(self, key: Key, filled: Sequence[float], replayed: Estimate) -> None:
        """Another variant where the closed form is far off, tighter bounds otherwise."""
        winner, part, (_, policy) = self.found[key], self.parts[key[0]], key
        assert winner.placement is not None
        assert winner.schedule is not None
        if _misjudged(part, winner, replayed) and (again := self._another_variant(key)):
            self.found[key] = again
            return
        # Slack that doubles ends this soon, whatever chance does to the few long requests of a replay.
        slack = 1 - _FIRST_SLACK * 2 ** (self.tries[key] - 1)
        self.limits[key] = scaled(self.limits[key], [slack / full if full > 1 else 1.0 for full in filled])
        # Another placement would gain less than the tighter bound costs.
        here = replace(_at(part, winner.placement), cluster=None)
        self.found[key] = candidate(
            here.held_to(self.limits[key]),
            policy,
            self.method,
            winner.search,
            without=self.given_up.get(key, []),
            # The latency of an outcome is the one that is bound; of several it is that of all over the first limit.
            outcomes=self.outcomes if len(self.problem.bounds) == 1 else None,
        )

    def optimum(self, division: Mapping[int, tuple[str, int]]) -> Optimum:
        """The plan of a division, all of whose pipelines are proved."""
        keys = sorted(_keys(division), key=lambda key: (-division[key[0]][1] * self.score(key), key))
        groups = self._groups(division, keys)
        first, proof = keys[0], self.proofs[keys[0]]
        placed = _at(self.parts[first[0]], groups[0].placement)
        counts = [group.num_replicas for group in groups]
        # The search's own estimates may be held to tighter bounds.
        pairs = zip(keys, groups, strict=True)
        alone = [(_at(self.parts[size], group.placement), group) for (size, _), group in pairs]
        estimates = [one.estimate(group.schedule) for one, group in alone]
        plan = _plan(self.problem, placed, groups, [self.proofs[key].margin for key in keys])
        found = tuple(self._candidate(policy) for policy in self.policies)
        seeds = self._seeds(keys, counts)
        stalls = [one.longest_stall(group.schedule) for one, group in alone]
        plan = replace(
            plan,
            longest_stall=asdict(max(stalls, key=lambda stall: stall.seconds)),
            estimate=proof.replayed if traced(self.problem) else together(estimates, counts),
            # What the order counts, too: pipelines of unequal replicas may have unequal numbers of seeds.
            replay=proof.replayed
            if self.problem.arrivals
            else together([self.proofs[key].replayed for key in keys], counts),
            search={
                **_summary([one.search for one in self.found.values() if one.search], self.method),
                "gap": self._gap(),
                "replays": len(seeds),
            },
        )
        if self.effort.headroom:
            plan = with_headroom(plan, [one for one, _ in alone])
        assert plan.estimate is not None
        assert plan.replay is not None
        for figures in (plan.estimate, plan.replay):
            assert max(utilizations(self.problem.bounds, figures)) <= 1, "a plan keeps its bounds by its own estimate"
        steady = steady_state(plan.schedule, self.problem.workload, placed.cost)
        ranked = None if self.problem.arrivals else self.order(division)
        return Optimum(
            plan=plan,
            candidates=found,
            beyond=placed.cost.beyond(steady.cycle),
            unproven=tuple(filter(None, (too_short(one, group.schedule) for one, group in alone))),
            run=proof.run,
            order=ranked and ranked[0],
            full=full_batches(alone) if self.problem.arrivals else None,
            groups=tuple(
                GroupFigures(group=group, estimate=one, replay=self.proofs[key].replayed)
                for key, group, one in zip(keys, groups, estimates, strict=True)
                if len(groups) > 1
            ),
            seeds=seeds,
        )

    def _seeds(self, keys: Sequence[Key], counts: Sequence[int]) -> tuple[Estimate, ...]:
        """Replays of all replicas of proved pipelines, by the seeds that all of them were replayed with."""
        each = [self.proofs[key].replays for key in keys]
        if self.problem.arrivals:  # Of all replicas already.
            return each[0]
        return tuple(together(of_seed, counts) for of_seed in zip(*each, strict=False))

    def _gap(self) -> float | None:
        """How much more throughput, relative and by the closed form, what the searches left out could have."""
        gaps = {key: one.search.gap for key, one in self.found.items() if one.search and one.search.gap is not None}
        known = {size: max(sustained(self.found[size, policy]) for policy in self.policies) for size in self.parts}
        hoped = {
            size: max(sustained(self.found[size, p]) * (1 + gaps.get((size, p), 0.0)) for p in self.policies)
            for size in self.parts
        }
        before, after = (
            division_throughput(scores, self._division({size: value for size, value in scores.items() if value}))
            for scores in (known, hoped)
        )
        return after / before - 1 if before and gaps else None

    def _groups(self, division: Mapping[int, tuple[str, int]], keys: Sequence[Key]) -> tuple[ReplicaGroup, ...]:
        """The replicas of a division, the group with the most throughput first."""
        devices = first_devices({size: count for size, (_, count) in division.items()}, self.problem.cluster)
        groups = []
        for key in keys:
            schedule, placement = self.found[key].schedule, self.found[key].placement
            assert schedule is not None
            assert placement is not None
            groups.append(
                ReplicaGroup(
                    schedule=schedule,
                    placement=placement,
                    first_devices=devices[key[0]],
                    kv_cache_tokens=kv_cache_tokens(_at(self.parts[key[0]], placement), schedule),
                    capacity=float(f"{sustained(self.found[key]):.4g}") if len(keys) > 1 else None,
                )
            )
        return tuple(groups)

    def _candidate(self, policy: str) -> Candidate:
        """A policy's own best division, or why it has none."""
        of_policy = {size: self.found[size, policy] for size in self.parts}
        searches = [one.search for one in of_policy.values() if one.search]
        if not (division := self.best([policy])):
            return self._refused(policy, of_policy, searches)
        keys = [(size, policy) for size in sorted(division, key=lambda s: -division[s][1] * self.score((s, policy)))]
        first, *more = self._groups(division, keys)
        estimates = [one for key in keys if (one := self.found[key].estimate) is not None]
        proved = all(key in self.proofs for key in keys)
        if traced(self.problem):
            return self._traced(keys[0], first, _added(self.found[keys[0]].search, searches))
        replayed = self.proofs[keys[0]].replayed.throughput if proved and self.problem.arrivals else None
        if self.problem.arrivals and not proved and max(utilizations(self.problem.bounds, estimates[0])) > 1:
            bound, share = binding(self.problem.bounds, estimates[0]) or (self.problem.bound, 0.0)
            refusal = f"{policy} needs {show_seconds(share * bound.seconds)} {bound.name} at this rate"
            return replace(self.found[keys[0]], schedule=None, refusal=refusal)
        return replace(
            self.found[keys[0]],
            estimate=together(estimates, [first.num_replicas, *(group.num_replicas for group in more)]),
            search=_added(self.found[keys[0]].search, searches),
            replicas=first.first_devices,
            more_replicas=tuple(more),
            replayed=self.throughput(division) if proved and not self.problem.arrivals else replayed,
        )

    def _traced(self, key: Key, group: ReplicaGroup, search: Result | None) -> Candidate:
        """A policy's best pipeline under the arrivals of a trace: what the replay of all its replicas says."""
        found, bounds = replace(self.found[key], search=search), self.problem.bounds
        assert found.estimate is not None
        placed = _at(self.parts[key[0]], group.placement)
        _, replays = self.replays.of(placed, group.schedule, found.estimate, replicas=group.num_replicas)
        replayed = mean_estimate(replays)
        if key not in self.proofs and (full := binding(bounds, replayed)) and full[1] > 1:
            bound, share = full
            refusal = f"{key[1]} needs {show_seconds(share * bound.seconds)} {bound.name} in the replay of the trace"
            return replace(found, schedule=None, refusal=refusal)
        return replace(found, estimate=replayed, replicas=group.first_devices, replayed=replayed.throughput)

    def unreplayed(self) -> list[Key]:
        """Of the arrivals of a trace: each policy's best pipeline that no replay has told of."""
        if not traced(self.problem):
            return []
        best = [self.best([policy]) for policy in self.policies]
        return [key for division in best for key in _keys(division) if key not in self.proofs]

    def tell(self, key: Key) -> None:
        """Replays a pipeline for what is told of its policy."""
        found = self.found[key]
        assert found.schedule is not None
        assert found.placement is not None
        assert found.estimate is not None
        placed = _at(self.parts[key[0]], found.placement)
        self.replays.of(placed, found.schedule, found.estimate, replicas=self._count(key[0]))

    def _refused(self, policy: str, of_policy: Mapping[int, Candidate], searches: Sequence[Result]) -> Candidate:
        """Why a policy has no plan: by the size that comes nearest to one."""

        def distance(size: int) -> tuple[float, bool, bool, float]:
            one = of_policy[size]
            short_of_memory = one.search is not None and "memory" in one.search.what_binds
            return -self._count(size) * reached(one), one.search is None, short_of_memory, _lowest_latency(one)

        size = min(of_policy, key=distance)
        refused = of_policy[size]
        if most := self._count(size) * reached(refused):
            refused = replace(refused, refusal=f"{policy} sustains {most:.3g} requests/s within the bounds")
        return replace(refused, search=_added(refused.search, searches))

    def refuse_rate(self, *, advise: bool) -> None:
        """Raises Infeasible for a rate that no schedule sustains; returns where the bounds alone are out of reach."""
        problem = self.problem
        if problem.arrivals and self.broken:
            schedule, replayed = min(self.broken, key=lambda pair: max(utilizations(problem.bounds, pair[1])))
            bound, share = binding(problem.bounds, replayed) or (problem.bound, 0.0)
            if share > 1:
                raise burst(problem, schedule, bound, share * bound.seconds)
        division = self.best()
        if not division:
            best = max(self.found, key=lambda key: (self._count(key[0]) * reached(self.found[key]), -key[0]))
            division = {best[0]: (best[1], self._count(best[0]))}
        size = max(division, key=lambda size: division[size][1] * reached(self.found[size, division[size][0]]))
        policy, count = division[size]
        most = self.found[size, policy]
        if most.search is None or most.search.best is None or most.placement is None:
            return
        part = replace(self.parts[size], min_throughput=problem.min_throughput / count)

        def search_again(other: Problem) -> tuple[float, Placement | None]:
            found = candidate(other, policy, self.method)
            return reached(found), found.placement

        raise too_slow(
            problem,
            _at(part, most.placement),
            most.search,
            reached=self.throughput(division) if not problem.arrivals else count * reached(most),
            by=[(number, self._most_throughput((size, name))) for size, (name, number) in division.items()],
            advice=wider_bounds(part, search_again, replicas=count) if advise else "",
        )

    def _most_throughput(self, key: Key) -> Schedule:
        """The schedule of the most throughput within the bounds, whether that suffices or not."""
        found = self.found[key]
        if found.schedule is not None:
            return found.schedule
        assert found.search is not None
        assert found.search.best is not None
        return self.problem.schedule(key[1], found.search.best.point)

    def last_resort(self) -> Optimum:
        """The lowest-latency schedule of all, if it keeps the bounds; its latency is the tightest possible bound."""
        fitting = [k for k, c in self.found.items() if c.search and "memory" not in c.search.what_binds]
        if not fitting:
            refusals = "; ".join(self._candidate(policy).refusal for policy in self.policies)
            raise Infeasible(f"no schedule fits {show_bytes(self.problem.memory)} of memory: {refusals}")
        key = min(fitting, key=lambda k: (_lowest_latency(self.found[k]), k))
        best, part = self.found[key], self.parts[key[0]]
        assert best.placement is not None
        assert best.search is not None
        placed = _at(part, best.placement)
        schedule = self.problem.schedule(best.policy, best.search.lowest_latency.point)
        estimate = placed.estimate(schedule)  # Refuses a rate beyond its capacity before a long replay.
        run, replays = self.replays.of(placed, schedule, estimate, replicas=self._count(key[0]))
        winner = replace(best, schedule=schedule, estimate=estimate, refusal="")
        margin = self.margin
        if self.risk:
            margin = margins(placed, schedule, self.risk, seed=self.seed)
        proof = _Proof(run=run, replays=replays, margin=margin)
        filled = _filled(part, winner, proof)
        if max(filled) > 1:
            bound = self.problem.bounds[filled.index(max(filled))]
            raise too_tight(placed, schedule, bound, max(filled) * bound.seconds)
        self.found[key] = winner
        self.proofs[key] = proof
        return self.optimum({key[0]: (key[1], self._count(key[0]))})


def _keys(division: Mapping[int, tuple[str, int]]) -> list[Key]:
    return [(size, policy) for size, (policy, _) in division.items()]


def _parts(problem: Problem, largest: int | None) -> dict[int, Problem]:
    """The problem of one pipeline of every size that holds the model, by its number of GPUs, rising."""
    if problem.cluster is None or problem.cluster.num_gpus == 1:
        return {1: replace(problem, min_throughput=0.0)}
    if problem.one_pipeline:
        return {problem.cluster.num_gpus: replace(problem, min_throughput=0.0)}
    found: dict[int, Problem] = {}
    for size in pipeline_sizes(problem.cluster):
        if largest and size > largest:
            break
        try:
            found[size] = problem.part(size, replicas=num_replicas(problem.cluster, size))
        except Infeasible:
            if size == problem.cluster.num_gpus:
                raise
    return found


def _at(problem: Problem, placement: Placement) -> Problem:
    """The problem on a placement; without a cluster the placement is the problem's own, with its links."""
    return problem.at(placement) if problem.cluster else problem


def _held(problem: Problem, margin: Margins | None) -> tuple[Bound, ...]:
    """The bounds, tightened by the margin that measured errors alone demand."""
    return scaled(problem.bounds, [1 / (1 + value) for value in margin.values]) if margin else problem.bounds


def _lowest_latency(found: Candidate) -> float:
    return found.search.lowest_latency.outcome.latency if found.search else float("inf")


def _added(search: Result | None, searches: Sequence[Result]) -> Result | None:
    """A search with the cost of all of them, and the largest gap."""
    if search is None:
        return None
    return replace(
        search,
        num_points=sum(one.num_points for one in searches),
        grid_size=sum(one.grid_size for one in searches),
        seconds=sum(one.seconds for one in searches),
        gap=max((one.gap for one in searches if one.gap is not None), default=None),
    )


def _misjudged(problem: Problem, winner: Candidate, replayed: Estimate) -> bool:
    """Whether the closed form is so far off that another placement is worth more than a tighter bound."""
    assert winner.estimate is not None
    if problem.cluster is None or problem.arrivals:
        return False
    pairs = zip(utilizations(problem.bounds, replayed), utilizations(problem.bounds, winner.estimate), strict=True)
    return any(full > _MISJUDGED * predicted for full, predicted in pairs)


def _filled(problem: Problem, winner: Candidate, proof: _Proof) -> list[float]:
    """The utilization of each bound: the larger of the replays' and the closed form's, with the margin if there is
    one; of a trace that comes at its own times the replay's."""
    assert winner.estimate is not None
    values = proof.margin.values if proof.margin else [0.0] * len(problem.bounds)
    replays = utilizations(problem.bounds, proof.replayed)
    predicted = replays if traced(problem) else utilizations(problem.bounds, winner.estimate)
    return [max(full, share * (1 + value)) for full, share, value in zip(replays, predicted, values, strict=True)]


def _plan(problem: Problem, placed: Problem, groups: Sequence[ReplicaGroup], margins: Sequence[Margins | None]) -> Plan:
    """The plan of these replicas without its estimates; `placed` is the problem of one of the first group."""
    model, first = problem.profile.model, groups[0]
    several = len(groups) > 1 or first.num_replicas > 1
    return Plan(
        model=model.reference or model.name,
        schedule=first.schedule,
        placement=first.placement,
        replicas=first.first_devices,
        more_replicas=tuple(groups[1:]),
        router=ROUTERS[0] if several else None,
        cluster=problem.cluster.name if problem.cluster else None,
        gpus=problem.cluster.num_gpus if problem.cluster else None,
        bound=problem.bound,
        more_bounds=problem.more_bounds,
        arrival_rate=problem.arrivals.rate if problem.arrivals and not problem.arrivals.of_trace else None,
        trace_arrivals=problem.arrivals is not None and problem.arrivals.of_trace,
        deadline=str(problem.workload.deadlines) if problem.workload.deadlines else None,
        dtype=problem.profile.dtype,
        kv_dtype=problem.profile.kv_dtype,
        routing=problem.profile.routing,
        device=problem.profile.device.kind,
        num_threads=problem.profile.device.num_threads,
        kv_cache_tokens=first.kv_cache_tokens,
        capacity=first.capacity,
        gpu_memory_utilization=problem.utilization,
        max_seqs=problem.max_seqs,
        model_fingerprint=model.fingerprint,
        quantization=str(model.quantization) if model.quantization else None,
        workload_fingerprint=problem.workload.fingerprint,
        profile_fingerprint=problem.profile.fingerprint,
        promise=_promise(problem, [margin for margin in margins if margin]),
    )


def _promise(problem: Problem, found: Sequence[Margins]) -> dict[str, Any]:
    """The margins of every group of replicas, that of the first in the promise itself."""
    if not found:
        return {}
    first, *more = (margin.promise(problem.bounds) for margin in found)
    return {"risk": found[0].risk, **first, **({"more_groups": more} if more else {})}


def _summary(searches: Sequence[Result], method: str) -> dict[str, Any]:
    """Cost and quality of searches: `points` evaluated, `seconds`, and the largest `gap` to an upper bound."""
    return {
        "method": method,
        "points": sum(search.num_points for search in searches),
        "grid": sum(search.grid_size for search in searches),
        "seconds": round(sum(search.seconds for search in searches), 4),
        "gap": max((search.gap for search in searches if search.gap is not None), default=None),
    }
