"""The version of exeplan, below every room that states it."""

__version__ = "0.1.0"
