"""exeplan: which execution schedule serves a language model best under a latency bound, and the engine that runs it."""

from exeplan.version import __version__

__all__ = ["__version__"]
