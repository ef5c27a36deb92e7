"""The one error a user causes.

    InputError          the request cannot be met or the input is wrong: one sentence, exit status 2, HTTP 400
      Infeasible        no schedule keeps the bound; the sentence says what binds and what would be possible

Everything else that is raised is a fault of ours and ends with exit status 1.
"""


class InputError(ValueError):
    """What a user gave is wrong. The message names what, where, and the nearest thing that works."""


class Infeasible(InputError):  # noqa: N818 (an outcome: nothing is wrong with the input)
    """Correct input that no schedule can satisfy; `nearest` says in a few words what would be possible.

    `wider` is the factor by which all bounds would have to be wider, where that is known.
    """

    def __init__(self, message: str, *, nearest: str = "", wider: float | None = None) -> None:
        super().__init__(message)
        self.nearest, self.wider = nearest, wider
