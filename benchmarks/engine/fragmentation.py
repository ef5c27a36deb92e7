"""What a fragmented KV cache costs: decode attention over the blocks that a long run leaves, and over fresh ones.

    python -m benchmarks.engine.fragmentation [--requests 4000] [--snapshots 12]

Scheduler and KV cache run requests of random lengths without computing them (which blocks a sequence gets does not
depend on its tokens): orca with 64 slots and a cache with room for half, three quarters and all of them at their full
length, outputs announced exactly or as the longest there is. At each snapshot attention over all layers (8 layers,
8 heads of 64, float32) is timed by turns, in CPU seconds and in the same memory: with the blocks as they are, as an
empty cache would place these sequences (with room for each to grow), and packed without gaps, which lasts until the
next token. Writes nothing.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from exeplan.core.batch import SequenceState, num_blocks_for
from exeplan.core.models.model import load_model_spec
from exeplan.core.schedule import Schedule
from exeplan.kernels.attention.plain import CachedRows, decode_attention
from exeplan.runner.compute.passes.kv_cache import KVCache
from exeplan.runner.compute.passes.residents import Residents
from exeplan.scheduling.scheduler import Scheduler

SPEC = replace(load_model_spec("demo"), num_layers=8, num_heads=8, num_kv_heads=8, head_dim=64, hidden_size=512)
_TINY = replace(SPEC, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1, hidden_size=1)
SLOTS, LONGEST, TURNS = 64, 240, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--snapshots", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("cache  announced  preempted  runs/sequence  ms as is  as is / fresh (spread)   as is / packed (spread)")
    for share in (0.5, 0.75, 1.0):
        for exact in (True, False):
            print(row(share, exact, args.requests, args.snapshots))


def row(share: float, exact: bool, num_requests: int, num_snapshots: int) -> str:
    """One line of the table: a run with a cache of that share of what full slots need at their longest."""
    num_blocks = int(share * SLOTS * num_blocks_for(2 * LONGEST))
    run = Run(num_blocks, exact=exact, num_requests=num_requests)
    found = [compared(run) for _ in run.snapshots(num_snapshots)]
    name = "exact" if exact else "longest"
    runs, now = (statistics.mean(getattr(one, what) for one in found) for what in ("runs", "now"))
    ratios = [spread([one.now / getattr(one, other) for one in found]) for other in ("fresh", "packed")]
    preempted = run.scheduler.num_preemptions
    return f"{share:5.2f}  {name:9s}  {preempted:9d}  {runs:13.2f}  {1e3 * now:8.1f}  {'   '.join(ratios)}"


def spread(ratios: list[float]) -> str:
    """The median with the smallest and the largest."""
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


@dataclass(frozen=True, slots=True)
class Compared:
    """One snapshot: CPU seconds of a pass' attention by where the blocks are, and runs of blocks a sequence."""

    now: float
    fresh: float
    packed: float
    runs: float


class Run:
    """A scheduler and a cache without a model between them."""

    def __init__(self, num_blocks: int, *, exact: bool, num_requests: int) -> None:
        self.rng, self.num_requests = random.Random(0), num_requests
        self.scheduler = Scheduler(Schedule("orca", {"max_num_seqs": SLOTS}), num_blocks)
        self.cache = written_cache(num_blocks)
        self.residents = Residents(self.cache, encodes=False)
        self.outputs: dict[str, int] = {}
        for number in range(num_requests):
            prompt, output = (self.rng.randint(16, LONGEST) for _ in range(2))
            self.outputs[str(number)] = output
            announced = output if exact else LONGEST
            self.scheduler.add(
                SequenceState(request_id=str(number), num_prompt_tokens=prompt, max_output_tokens=announced)
            )
        self.rows: tuple[SequenceState, ...] = ()

    def snapshots(self, count: int) -> Iterator[None]:
        """Stops that many times, evenly, between the first tenth of the requests and the last."""
        due = [int(self.num_requests * (0.1 + 0.8 * number / count)) for number in range(count)]
        while due and (batch := self.scheduler.next_batch()):
            self.residents.place(batch)
            for sequence in (*batch.prefill, *batch.decode):
                sequence.num_output_tokens += 1
                sequence.finished = sequence.num_output_tokens >= self.outputs[sequence.request_id]
            for sequence in self.scheduler.complete(batch):
                self.residents.free(sequence.request_id)
            if self.num_requests - len(self.scheduler.waiting) >= due[0] and batch.decode:
                del due[0]
                self.rows = tuple(s for s in (*batch.prefill, *batch.decode) if s.num_blocks and not s.finished)
                yield


def compared(run: Run) -> Compared:
    """The blocks as they are against others, by turns; the fastest of each."""
    ways = {"now": run.cache, "fresh": placed(run, full_blocks), "packed": placed(run, lambda row: row.num_blocks)}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(TURNS):
        for way, cache in ways.items():
            seconds[way].append(attention_seconds(run, cache))
    runs = statistics.mean(num_runs(run.cache, row) for row in run.rows)
    return Compared(**{way: min(values) for way, values in seconds.items()}, runs=runs)


def placed(run: Run, hint: Callable[[SequenceState], int]) -> KVCache:
    """The resident sequences in an empty cache, one after the other; it tells places only."""
    cache = KVCache(_TINY, run.cache.num_blocks, torch.float32, torch.device("cpu"))
    for row in run.rows:
        cache.resize(row.request_id, row.num_blocks, hint(row))
    return cache


def full_blocks(row: SequenceState) -> int:
    """Of a sequence at its full length."""
    return num_blocks_for(row.num_prompt_tokens + row.max_output_tokens)


def num_runs(cache: KVCache, sequence: SequenceState) -> int:
    """Of adjacent blocks."""
    blocks = cache.blocks(sequence.request_id)
    return 1 + int((blocks[1:] != blocks[:-1] + 1).sum())


def written_cache(num_blocks: int) -> KVCache:
    """A cache all of whose memory is there: pages that were never written are all the same one."""
    cache = KVCache(SPEC, num_blocks, torch.float32, torch.device("cpu"))
    for layer in range(SPEC.num_layers):
        cache.both_tables(layer).fill_(0.5)
    return cache


@torch.inference_mode()
def attention_seconds(run: Run, placed: KVCache) -> float:
    """CPU seconds of one decode pass' attention where another cache places the blocks, what it prepares included."""
    cache, rows = run.cache, run.rows
    q_BHD = torch.ones(len(rows), SPEC.num_heads, SPEC.head_dim)
    start = time.process_time()
    contexts = [row.num_tokens - 1 for row in rows]
    slots = placed.slots_of_all([row.request_id for row in rows], [(0, context) for context in contexts])
    cached = CachedRows(
        slots,
        contexts,
        num_heads=SPEC.num_heads,
        num_kv_heads=SPEC.num_kv_heads,
        num_slots=cache.num_slots,
        like=cache.table(0)[0],
    )
    for layer in range(SPEC.num_layers):
        decode_attention(q_BHD, *cache.table(layer), cached, scale=0.125)
    return time.process_time() - start


if __name__ == "__main__":
    main()
