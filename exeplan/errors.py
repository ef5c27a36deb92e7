"""The errors that a user causes.

    InputError          the request cannot be met or the input is wrong: one sentence, exit status 2, HTTP 400
      Infeasible        no schedule keeps the bound; the sentence says what binds and what would be possible
      MissingPackage    a package of an extra is not installed; the sentence says how to install it

They are ValueErrors. Their sentences name options as the command line does; in Python `--latency-bound` is the argument
`latency_bound`. Every other exception is a fault of exeplan and ends with exit status 1.
"""


class InputError(ValueError):
    """Wrong input. The message names what, where, and the nearest thing that works."""


def one_line(text: str) -> str:
    """The text with line ends and other control characters as escapes, as a terminal may safely show it."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def shown(value: object) -> str:
    """A value for a message: on one line, and short."""
    text = value if isinstance(value, str) and value.isidentifier() else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Infeasible(InputError):  # noqa: N818 (an outcome: nothing is wrong with the input)
    """Correct input that no schedule can satisfy; `nearest` says in a few words what would be possible.

    `wider` is the factor by which all bounds would have to be wider, `reached` the requests/s where more are required;
    where they are known.
    """

    def __init__(
        self, message: str, *, nearest: str = "", wider: float | None = None, reached: float | None = None
    ) -> None:
        super().__init__(message)
        self.nearest, self.wider, self.reached = nearest, wider, reached


class MissingPackage(InputError):  # noqa: N818 (nothing is wrong with the input)
    """A package that only some features need is not installed."""
