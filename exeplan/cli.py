"""The command line: `exeplan <command>`. One file a command under `commands/`, found by its name.

A command module has a docstring (its help), `POSITION` (its place in the list of commands), `add_arguments(parser)` and
`run(args) -> int`. Heavy imports live in `run`, so that `exeplan --help` is instant.

Exit status: 0 done, 2 the request cannot be met or the input is wrong, 1 a fault of exeplan, 130 interrupted (`serve`
drains then, which is done: 0).
"""

import argparse
import importlib
import pkgutil
import re
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NoReturn

from exeplan import commands
from exeplan.errors import InputError, one_line
from exeplan.extras import EXTRA_OF, missing
from exeplan.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    args = _parse(list(_joined(sys.argv[1:] if argv is None else argv)))
    try:
        return int(args.run(args))
    except InputError as error:
        print(f"exeplan {args.command}: {one_line(str(error))}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRA_OF:
            raise
        print(f"exeplan {args.command}: {missing('this', module)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:  # Its text, if any, says what was kept.
        print(f"exeplan {args.command}: {stop or 'interrupted'}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # The reader of our output went away, as `head` does.
        sys.stderr.close()
        return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    """The arguments; one that the command does not know is its mistake, not that of `exeplan` as a whole."""
    args, unknown = _parser().parse_known_args(argv)
    if unknown:
        options = f"unrecognized arguments: {' '.join(unknown)}"
        print(f"exeplan {args.command}: {options}; see `exeplan {args.command} --help`", file=sys.stderr)
        raise SystemExit(2)
    return args


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def _joined(argv: Sequence[str]) -> Iterator[str]:
    """`--latency-bound -1s` as `--latency-bound=-1s`: argparse would take the value for an unknown option."""
    option = None
    for word in argv:
        if option and re.match(r"-\.?(\d|inf|nan)", word):
            yield f"{option}={word}"
            option = None
            continue
        if option:
            yield option
        option = word if word.startswith("--") and "=" not in word else None
        if option is None:
            yield word
    if option:
        yield option


def _commands() -> list[tuple[str, ModuleType]]:
    """The modules of `exeplan.commands` by their names, in the order of their positions."""
    names = [found.name for found in pkgutil.iter_modules(commands.__path__)]
    found = [(name, importlib.import_module(f"exeplan.commands.{name}")) for name in names]
    return sorted(found, key=lambda pair: (pair[1].POSITION, pair[0]))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="exeplan",
        description="Finds the execution schedule that best serves a language model under a latency bound; runs it.",
    )
    parser.add_argument("--version", action="version", version=f"exeplan {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _commands():
        summary, _, rest = (module.__doc__ or "").partition("\n")
        command = subparsers.add_parser(
            name,
            help=summary,
            description=f"{summary}\n{rest}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
