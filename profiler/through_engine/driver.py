"""EngineDriver: a process that has a serving engine with some number of the model's layers, and times batches on it."""

import contextlib
import json
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from exeplan.core.models.model import NUM_LAYERS, ModelSpec
from exeplan.errors import InputError
from exeplan.profiler.through_engine.batches import DecodeBatch, PrefillBatch, Reach

_PROGRAM = Path(__file__).with_name("vllm_driver.py")
_END_SECONDS, _PATIENCE_SECONDS = 20.0, 900.0
"""Until an engine that is to end, or that does not answer, is killed."""
_LAST_LINES = 3
"""Of the engine's log, which a failure shows where no line of it names an error."""
_REASON = re.compile(r"\b\w*(Error|Exception): ")


class EngineDriver:
    """One engine process; a context manager."""

    def __init__(
        self,
        python: str,
        spec: ModelSpec,
        num_layers: int,
        *,
        dtype: str,
        reach: Reach,
        environment: Mapping[str, str],
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts it. `python` is the interpreter that has the engine, `settings` are further ones of vLLM's.

        Raises InputError where it cannot be run.
        """
        self._files = contextlib.ExitStack()
        folder = Path(self._files.enter_context(tempfile.TemporaryDirectory(prefix="exeplan-engine-")))
        (folder / "config.json").write_text(json.dumps(with_layers(spec.config, num_layers)))
        self._log = self._files.enter_context((folder / "engine.log").open("w+", errors="replace"))
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        try:
            self._process = subprocess.Popen(
                [python, str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env={**variables, **environment},
            )
        except OSError as error:
            self._files.close()
            raise InputError(f"cannot run '{python}': {error.strerror}") from None
        self._send(
            {
                "model": str(folder),
                "model_type": spec.config["model_type"],
                "vocab_size": spec.vocab_size,
                "dtype": dtype,
                "max_model_len": reach.max_context,
                "max_num_seqs": reach.max_num_seqs,
                "max_num_batched_tokens": reach.max_num_tokens,
                "kv_cache_memory_bytes": reach.kv_bytes(spec, num_layers, dtype),
                **(settings or {}),
            }
        )

    def __enter__(self) -> "EngineDriver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Its standard input ends, and so does the program; one that takes longer is killed."""
        with self._process, self._files:
            with contextlib.suppress(OSError):
                _pipe(self._process.stdin).close()
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def version(self) -> str:
        """Of the engine, once it is ready. Raises InputError where it does not start."""
        return str(self._receive()["version"])

    def prefill_seconds(self, batch: PrefillBatch) -> float:
        """Of a pass with these prompts alone."""
        self._send({"prefill": {"lengths": batch.lengths}})
        return float(self._receive()["seconds"])

    def decode_seconds(self, batch: DecodeBatch) -> Sequence[float]:
        """Of successive passes."""
        self._send({"decode": {"num_seqs": batch.num_seqs, "context": batch.first_context, "steps": batch.steps}})
        return [float(seconds) for seconds in self._receive()["seconds"]]

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # It has ended: `_receive` says why.
            pipe = _pipe(self._process.stdin)
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()

    def _receive(self) -> dict[str, Any]:
        patience = threading.Timer(_PATIENCE_SECONDS, self._process.kill)
        patience.start()
        line = _pipe(self._process.stdout).readline()
        patience.cancel()
        reply: dict[str, Any] = json.loads(line) if line else {"error": self._last_lines()}
        if "error" in reply:
            raise InputError(f"the engine does not run this: {reply['error']}")
        return reply

    def _last_lines(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        reasons = [line for line in lines if _REASON.search(line)]
        return " / ".join(reasons[:1] or lines[-_LAST_LINES:]) or "it ended without a word"


def with_layers(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The config of a model with fewer layers: settings that are listed a layer are cut."""
    spelled = next(name for name in NUM_LAYERS if config.get(name) is not None)
    whole = config[spelled]
    cut = {
        name: value[:num_layers] for name, value in config.items() if isinstance(value, list) and len(value) == whole
    }
    return {**config, **cut, spelled: num_layers}


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
