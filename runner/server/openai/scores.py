"""Scores: log-probabilities of an output's tokens, kept in arrays until its answer is written.

An answer may have ten million of them. As objects they would take more than a gigabyte, and freeing them at once would
stop the server for seconds.
"""

from array import array
from collections.abc import Iterable, Iterator

from exeplan.runner.ipc.messages import Logprob


class Scores:
    """The log-probabilities of tokens, each with those of the most likely ones."""

    def __init__(self) -> None:
        self._token_ids, self._logprobs = array("i"), array("d")
        """Of each token, and then of the most likely ones in its place."""
        self._ends = array("q")
        """Of each token's part of these."""

    def __len__(self) -> int:
        return len(self._ends)

    def extend(self, entries: Iterable[Logprob]) -> None:
        for entry in entries:
            self._token_ids.append(entry.token_id)
            self._logprobs.append(entry.logprob)
            self._token_ids.extend(token_id for token_id, _ in entry.top)
            self._logprobs.extend(logprob for _, logprob in entry.top)
            self._ends.append(len(self._token_ids))

    def __iter__(self) -> Iterator[Logprob]:
        begin = 0
        for end in self._ends:
            token_ids, logprobs = self._token_ids[begin:end], self._logprobs[begin:end]
            yield Logprob(token_ids[0], logprobs[0], tuple(zip(token_ids[1:], logprobs[1:], strict=True)))
            begin = end
