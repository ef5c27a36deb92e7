"""exeplan: which execution schedule serves a language model best under a latency bound, and the engine that runs it."""

__version__ = "0.1.0"
