"""Two ranks of a tensor-parallel group, and one of them as a program: the logits of every job they are given.

python ranks.py RANK BUFFER JOBS OUTPUT
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from exeplan.core.batch import Batch, SequenceState, num_blocks_for
from exeplan.core.models.model import load_model_spec
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.weights.shard import ALONE, Group, Shard
from exeplan.runner.ipc.collectives import SharedBuffer, SharedMemoryGroup, group_bytes

TIMEOUT = 120.0
"""Seconds; the other rank may still be importing."""
VOCAB = 199
PROMPTS = {"a": 17, "b": 5, "c": 29}
TOKENS = {name: [(7 + 31 * n * n + size) % VOCAB for n in range(size + 3)] for name, size in PROMPTS.items()}


def outputs_of_two(folder: Path, jobs: dict[str, dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Runs both ranks on these jobs. Returns the logits by job, of each rank."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    buffer = SharedBuffer(group_bytes(2))
    outputs = [folder / f"{rank}.safetensors" for rank in range(2)]
    running = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), buffer.path, str(folder / "jobs.json"), str(output)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank, output in enumerate(outputs)
    ]
    assert [process.wait() for process in running] == [0, 0]
    buffer.close()
    return [load_file(output) for output in outputs]


def batches() -> Iterator[Batch]:
    """Two prompts, a third one together with their decode, and a decode of all three."""
    for prefill, decode in (({"a": 0, "b": 0}, {}), ({"c": 0}, {"a": 1, "b": 1}), ({}, {"a": 2, "b": 2, "c": 1})):
        yield Batch(prefill=rows(prefill), decode=rows(decode))


def rows(outputs: dict[str, int]) -> tuple[SequenceState, ...]:
    return tuple(
        SequenceState(
            request_id=name,
            num_prompt_tokens=PROMPTS[name],
            max_output_tokens=3,
            num_output_tokens=count,
            num_blocks=num_blocks_for(PROMPTS[name] + count),
        )
        for name, count in outputs.items()
    )


def stages(
    model: str,
    cuts: Sequence[Sequence[int]],
    group: Group = ALONE,
    *,
    dtype: str = "float32",
    dummy: bool = False,
    whole_experts: bool = False,
) -> list[ModelRunner]:
    """A pipeline of the given layers, first to last exclusive, each stage held by the group."""
    spec = load_model_spec(model)
    return [
        ModelRunner(
            spec,
            shard=Shard(
                layers=(first, last),
                first=first == 0,
                last=last == spec.num_layers,
                group=group,
                whole_experts=whole_experts,
            ),
            dtype=dtype,
            num_blocks=8,
            dummy_weights=dummy,
        )
        for first, last in cuts
    ]


def logits(pipeline: Sequence[ModelRunner]) -> torch.Tensor:
    """Of all rows of all batches, each batch passed from stage to stage."""
    found = []
    for batch in batches():
        hidden = None
        for stage in pipeline:
            hidden = stage.forward(batch, TOKENS, hidden)
        found.append(hidden)
    return torch.cat(found)


def run(rank: int, buffer: str, jobs: dict[str, dict[str, Any]], output: Path) -> None:
    torch.set_num_threads(1)
    group = SharedMemoryGroup(buffer, rank, 2, TIMEOUT)
    save_file({key: logits(stages(group=group, **job)).contiguous() for key, job in jobs.items()}, output)


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2], json.loads(Path(sys.argv[3]).read_text()), Path(sys.argv[4]))
