"""One module a command; see `exeplan/cli.py`."""
