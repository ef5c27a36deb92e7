"""serve a plan over an OpenAI-compatible HTTP API

Completions, chat completions, models, health, metrics and the plan itself, and a live dashboard at /.
Listens on 127.0.0.1 unless --host says otherwise, from the start: while the model is loaded /health is 200, /ready and
generation are 503; when it is warm, one line is printed (with
--log-format json a record is logged, on standard error). SIGTERM or SIGINT (Ctrl-C) stops taking requests, finishes
the running ones and ends with status 0; a second one ends at once. SIGHUP reads the plan's file again and goes over to
it where it was written or touched, POST /plan with an API key in any case. When the engine fails for good the server
ends with status 1.
"""

import argparse

from exeplan.extras import SERVING, require
from exeplan.runner.server.arguments import add_arguments, run_server

__all__ = ["POSITION", "add_arguments", "run"]

POSITION = 70


def run(args: argparse.Namespace) -> int:
    """Serves until a signal; returns the exit status."""
    require("serving", *SERVING)
    if args.ray:
        require("--ray", "ray")
    return run_server(args)
