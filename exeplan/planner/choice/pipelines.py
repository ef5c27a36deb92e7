"""Pipelines: the candidates on pipelines of every size, their replays, and which division of a cluster is best by them.

A pipeline is replayed where the best division uses it, or where the closed form's error may hide that a better division
would (`ranking.py`). Where a replay breaks a bound, the search is repeated under bounds tightened by the overshoot.

Not here: the loop that decides what is replayed next (`optimize.py`), the search of one pipeline (`candidates.py`), and
the plan that is made of a division (`answers.py`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from exeplan.core.bounds import Bound, scaled, utilizations
from exeplan.core.schedule import Estimate, Placement, Schedule, num_ranks
from exeplan.errors import Infeasible
from exeplan.planner.choice.adjusting import adjusted_schedules, may_gain
from exeplan.planner.choice.candidates import (
    Candidate,
    Key,
    Known,
    candidate,
    candidates,
    not_searched,
    sustained,
)
from exeplan.planner.choice.exhaustive import search_progress
from exeplan.planner.choice.search_space import Outcomes
from exeplan.planner.choice.seeded_replays import MOST_ADDED, Replays
from exeplan.planner.margins.margins import Margins, Risk, expected_margins, margins
from exeplan.planner.problems.headroom import Headrooms
from exeplan.planner.problems.problem import Problem
from exeplan.planner.problems.ranking import MOST_SEEDS, Order, behind, mean_estimate
from exeplan.planner.problems.replays import promised
from exeplan.planner.problems.replicas import (
    Division,
    best_division,
    division_throughput,
    pipeline_sizes,
)
from exeplan.progress import Told
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.run import Run

_RETRIES = 8
"""Searches under tightened bounds, of one policy on pipelines of one size."""
_FIRST_SLACK = 0.001
"""What the first of them leaves between the bound and the replay, beyond the overshoot: where passes are bound by the
weights, 1 % of latency is worth 10 % of throughput."""
_DOUBT = 0.05
"""How much better than its closed form a replay may be; nearly all are within half of it."""
_SURE_GAIN = 0.001
"""What equal replicas with the places of idle GPUs serve more than the best division, at least and by the closed form:
replays of other divisions are then left out."""
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
    one_replica: bool = False
    """At a rate, replay one replica alone with its share of the stream, and all of them only where that breaks a bound:
    a router that looks at the queues makes none longer."""
    report: bool = True
    """Compute what is told beside the plan: its headroom, and replays of the policies that lose at a rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
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
        self.held = held = tuple(less_margin(problem, self.margin))
        tight = {size: part.held_to(held) for size, part in self.parts.items()}
        share = len(tight) / (len(tight) + len(_parts_with_idle_places(problem, tight, effort.largest)))
        progress = search_progress(problem, tight, policies, method, told.part(0.0, share))
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
                self.parts[size] = problem.part(size, replicas=self.count(size))
            for policy in policies:
                self.found.setdefault((size, policy), not_searched(policy))
        self.alike = problem.one_pipeline or problem.arrivals is not None
        """All replicas are equal."""
        self.proofs: dict[Key, Proof] = {}
        self.headrooms: dict[Key, Headrooms] = {}
        """Of proved pipelines at a rate (`most_headroom.py`)."""
        self.replays = Replays(
            problem,
            seed=seed,
            num_requests=effort.num_requests,
            further=effort.close_ones,
            one_replica=effort.one_replica,
        )
        self.added_requests = 0
        """Replayed with further seeds, to make an order certain."""
        self.given_up: dict[Key, list[tuple[Placement, Schedule]]] = {}
        self.shelved: dict[Key, tuple[Candidate, Proof]] = {}
        """Proved variants of which the closed form promised far more, while another one is looked at."""
        self.tries: Counter[Key] = Counter()
        self.broken: list[tuple[Schedule, Estimate]] = []
        """Schedules whose replay broke a bound."""
        self.unsure: dict[Key, Infeasible] = {}
        """Why the size of the trace leaves open whether a proved schedule sustains the rate, with a stated risk."""
        self._share_places_of_idle_gpus(known, told.part(share, 1.0))
        self.limits: dict[Key, tuple[Bound, ...]] = dict.fromkeys(self.found, held)

    def _share_places_of_idle_gpus(self, known: Known | None, told: Told) -> None:
        """Equal replicas alone, where they certainly serve more with the places for residents that GPUs have which they
        leave idle: in proportion to its GPUs any division may have its places, and idle ones keep theirs.

        Not looked for where more places are of no use.
        """
        idle = _parts_with_idle_places(self.problem, self.parts, self.effort.largest)
        if not idle or not (idle.keys() - self.parts.keys() or self._residents_bind()):
            return
        tight = {size: part.held_to(self.held) for size, part in idle.items()}
        least, outcomes = (1 + _SURE_GAIN) * self.throughput(self.best()), Outcomes()
        searched = candidates(
            self.problem.held_to(self.held),
            tight,
            self.policies,
            self.method,
            known=known,
            outcomes=outcomes,
            alike=True,
            at_least=least,
            progress=search_progress(self.problem, tight, self.policies, self.method, told),
        )
        found = {key: one for key, one in searched.items() if self.count(key[0]) * sustained(one) > least}
        if found:
            self.alike, self.outcomes = True, outcomes
            for size in sorted({size for size, _ in found}):
                self.parts[size] = idle[size]
                for policy in self.policies:
                    self.found.setdefault((size, policy), not_searched(policy))
            self.found |= found

    def _residents_bind(self) -> bool:
        """Whether the best schedule of a pipeline, or the lowest-latency one where it has none, fills more than half of
        its places: no batch has a next size of more than twice as many."""
        for (size, policy), one in self.found.items():
            if one.search is None or one.placement is None:
                continue
            part, trial = self.parts[size], one.search.best or one.search.lowest_latency
            schedule, placed = self.problem.schedule(policy, trial.point), placed_at(part, one.placement)
            if 2 * steady_state(schedule, part.workload, placed.cost).cycle.num_seqs > part.max_seqs:
                return True
        return False

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
        return {size: (best[size][2], count) for size, count in self.divided(scores).items()}

    def divided(self, scores: Mapping[int, float]) -> Division:
        if self.alike:
            most = max(scores, key=lambda size: (self.count(size) * scores[size], size), default=None)
            return {} if most is None else {most: self.count(most)}
        return best_division(scores, self.problem.cluster)

    def count(self, size: int) -> int:
        """Equal replicas of this size."""
        return self.problem.replicas_of(size)

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
        if unproved := [key for key in keys_of(division) if key not in self.proofs]:
            return max(unproved, key=lambda key: division[key[0]][1] * self.score(key))
        if self.problem.arrivals or not self.effort.close_ones:
            return None
        most = self.throughput(division)
        for rival in self._rivals(division):
            unproved = [key for key in keys_of(rival) if key not in self.proofs]
            if unproved and self._hoped_throughput(rival) > most:
                return max(unproved, key=lambda key: rival[key[0]][1] * self.score(key))
        order = self.order(division)
        if order is None or order[0].certain or order[0].alike:
            return None
        if order[0].behind > _DOUBT or order[0].num_seeds >= MOST_SEEDS:
            return None
        pair = [key for key in {*keys_of(division), *keys_of(order[1])} if self._num_seeds(key) == order[0].num_seeds]
        return min(pair) if self.added_requests < MOST_ADDED else None

    def _rivals(self, division: Mapping[int, tuple[str, int]]) -> list[dict[int, tuple[str, int]]]:
        """The best divisions without one of its pipelines."""
        found = [self.best(without=key, doubt=_DOUBT) for key in keys_of(division)]
        return sorted((rival for rival in found if rival), key=lambda rival: -self._hoped_throughput(rival))

    def _hoped_throughput(self, division: Mapping[int, tuple[str, int]]) -> float:
        return sum(count * self._hoped((size, policy), _DOUBT) for size, (policy, count) in division.items())

    def order(self, division: Mapping[int, tuple[str, int]]) -> tuple[Order, dict[int, tuple[str, int]]] | None:
        """How a division compares with the next best one that was replayed whole, and that one; None without one."""
        found = [self.best(without=key) for key in keys_of(division)]
        rivals = [rival for rival in found if rival and all(key in self.proofs for key in keys_of(rival))]
        if not rivals:
            return None
        other = max(rivals, key=self.throughput)
        num_seeds = min(self._num_seeds(key) for key in (*keys_of(division), *keys_of(other)))
        of_seeds = (self._of_seeds(one, num_seeds) for one in (division, other))
        less, interval = behind(*of_seeds, look_by_look=True)
        name = " and ".join(str(self.found[key].schedule) for key in keys_of(other))
        return Order(runner_up=name, behind=less, interval=interval, num_seeds=num_seeds), other

    def _num_seeds(self, key: Key) -> int:
        return len(self.proofs[key].replays)

    def _of_seeds(self, division: Mapping[int, tuple[str, int]], num_seeds: int) -> list[float]:
        """Requests/s of all replicas, by seed."""
        found = [(division[key[0]][1], self.proofs[key].replays) for key in keys_of(division)]
        return [sum(count * replays[seed].throughput for count, replays in found) for seed in range(num_seeds)]

    def told(self, key: Key) -> Estimate:
        """The replays of a candidate, or a brief one of a policy that loses; both where requests arrive."""
        if key in self.proofs:
            return self.proofs[key].replayed
        found = self.found[key]
        assert found.schedule is not None
        assert found.placement is not None
        placed = placed_at(self.parts[key[0]], found.placement)
        return self.replays.told(placed, found.schedule, replicas=self.count(key[0]))

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
        placed = placed_at(part, winner.placement)
        run, replays = self.replays.of(placed, winner.schedule, replicas=self.count(size))
        proof = Proof(run=run, replays=replays, margin=self.margin)
        # What breaks a bound by the margin of measured errors alone needs no replays for its own.
        if self.risk and max(filled(part, winner, proof)) <= 1:
            try:
                own = margins(placed, winner.schedule, self.risk, seed=self.seed)
            except Infeasible as error:
                self.unsure[key] = error
                self.found[key] = replace(winner, schedule=None, refusal=str(error))
                return
            proof = replace(proof, margin=own)
        if max(filled(part, winner, proof)) <= 1:
            self._prove(key, proof)
        else:
            self._disprove(key, proof)

    def _disprove(self, key: Key, proof: Proof) -> None:
        """Adjusts the candidate, searches again, or gives it up: its replays break a bound."""
        if self._adjust(key, proof):
            return
        winner, replayed = self.found[key], proof.replayed
        assert winner.schedule is not None
        self.broken.append((winner.schedule, replayed))
        self.tries[key] += 1
        if self.tries[key] >= _RETRIES:
            kept = proof.margin and max(utilizations(self.problem.bounds, replayed)) <= 1
            why = "keeps the bounds, but not with the margin of --risk," if kept else "breaks a bound"
            self.found[key] = replace(winner, schedule=None, refusal=f"{winner.policy} {why} in its replays")
            return
        self._search_again(key, filled(self.parts[key[0]], winner, proof), replayed)

    def _prove(self, key: Key, proof: Proof) -> None:
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

    def _adjust(self, key: Key, proof: Proof) -> bool:
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
        placed, taken = placed_at(self.parts[key[0]], winner.placement), None
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

    def _promised_more(self, key: Key, proof: Proof) -> bool:
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
        placed = placed_at(self.parts[key[0]], found.placement)
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
        here = replace(placed_at(part, winner.placement), cluster=None)
        self.found[key] = candidate(
            here.held_to(self.limits[key]),
            policy,
            self.method,
            winner.search,
            without=self.given_up.get(key, []),
            # The latency of an outcome is the one that is bound; of several it is that of all over the first limit.
            outcomes=self.outcomes if len(self.problem.bounds) == 1 else None,
        )


def keys_of(division: Mapping[int, tuple[str, int]]) -> list[Key]:
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
            found[size] = problem.part(size, replicas=problem.replicas_of(size))
        except Infeasible:
            if size == problem.cluster.num_gpus:
                raise
    return found


def _parts_with_idle_places(problem: Problem, parts: Mapping[int, Problem], largest: int | None) -> dict[int, Problem]:
    """The problems of one of equal pipelines that leave GPUs idle, with the places of those, by the number of GPUs;
    none where all replicas are equal already, and where GPUs have the places that were measured."""
    if problem.cluster is None or problem.seqs_measured or problem.one_pipeline or problem.arrivals:
        return {}
    found: dict[int, Problem] = {}
    for size in sorted({*pipeline_sizes(problem.cluster), *parts}):
        count = problem.replicas_of(size)
        if count * size == problem.cluster.num_gpus or (largest and size > largest):
            continue
        with suppress(Infeasible):  # The model does not fit so few GPUs.
            found[size] = problem.part(size, replicas=count, alike=True)
    return found


def placed_at(problem: Problem, placement: Placement) -> Problem:
    """The problem on a placement; without a cluster the placement is the problem's own, with its links."""
    return problem.at(placement) if problem.cluster else problem


def less_margin(problem: Problem, margin: Margins | None) -> tuple[Bound, ...]:
    """The bounds, tightened by the margin that measured errors alone demand."""
    return scaled(problem.bounds, [1 / (1 + value) for value in margin.values]) if margin else problem.bounds


def lowest_latency(found: Candidate) -> float:
    return found.search.lowest_latency.outcome.latency if found.search else float("inf")


def _misjudged(problem: Problem, winner: Candidate, replayed: Estimate) -> bool:
    """Whether the closed form is so far off that another placement is worth more than a tighter bound."""
    assert winner.estimate is not None
    if problem.cluster is None or problem.arrivals:
        return False
    pairs = zip(utilizations(problem.bounds, replayed), utilizations(problem.bounds, winner.estimate), strict=True)
    return any(full > _MISJUDGED * predicted for full, predicted in pairs)


def filled(problem: Problem, winner: Candidate, proof: Proof) -> list[float]:
    """The utilization of each bound: the larger of the replays' and the closed form's, with the margin if there is
    one; where requests arrive the replays' as `promised`."""
    assert winner.estimate is not None
    values = proof.margin.values if proof.margin else [0.0] * len(problem.bounds)
    replays = utilizations(problem.bounds, proof.replayed)
    told = promised(proof.replayed, winner.estimate) if problem.arrivals else winner.estimate
    predicted = utilizations(problem.bounds, told)
    return [max(full, share * (1 + value)) for full, share, value in zip(replays, predicted, values, strict=True)]
