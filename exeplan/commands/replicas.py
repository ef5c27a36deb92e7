"""show what the replicas of a server do, drain one, or have it serve again

`replicas URL` lists them; of a plan that has one there is nothing to list (status 2). `replicas URL drain 1` gives
replica 1 no more requests, and ends it once it has answered those that it has, so that its host can be upgraded;
`replicas URL resume 1` starts it again. No request is refused for either. Any front end of the service may be asked.
Changes need the key of an administrator.
"""

import argparse
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

POSITION = 75
ACTIONS = ("drain", "resume")
_LOOK_SECONDS = 0.2
"""Between two looks whether a replica has drained, or serves."""
_PATIENCE_SECONDS = 30.0
_REACHED = {"drain": "drained", "resume": "serving"}
_ENDED = ("failed", "stopped", "drained")
"""States from which a replica that was resumed does not come to serve."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="of the server, such as http://127.0.0.1:8000")
    parser.add_argument("action", nargs="?", choices=ACTIONS, help="what is done (default: nothing, they are listed)")
    parser.add_argument("number", nargs="?", type=int, metavar="N", help="of the replica, from 0")
    parser.add_argument("--move", action="store_true", help="with drain: the others go on with what it has")
    parser.add_argument(
        "--wait", metavar="TIME", help="return once it has drained, or serves again; status 2 where that takes longer"
    )
    parser.add_argument("--api-key", metavar="KEY", help="default: $EXEPLAN_API_KEY")
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help="trust these certificates, not the system's")
    parser.add_argument("--json", action="store_true", help="as the server says it")


def run(args: argparse.Namespace) -> int:
    """Prints the replicas as they are in the end."""
    import json

    from exeplan.planner.reports.tables import table

    patience = _check(args)
    found = _ask(args, _change(args))
    if patience is not None:
        found = _await(args, found, patience)
    if args.json:
        print(json.dumps({"replicas": found}))
        return 0
    rows = [[str(one["number"]), one["state"], str(one["num_requests"]), one["reason"] or ""] for one in found]
    print(table(("replica", "state", "requests", "reason"), rows))
    return 0


def _check(args: argparse.Namespace) -> float | None:
    """How many seconds it waits, if it does. Raises InputError for what does not go together."""
    from exeplan.errors import InputError
    from exeplan.units import seconds

    if not args.url.startswith(("http://", "https://")):
        raise InputError(f"the server's URL must begin with http:// or https://, found '{args.url}'")
    if args.action and args.number is None:
        raise InputError(f"say which replica to {args.action}, such as {args.action} 0")
    if args.move and args.action != "drain":
        raise InputError("--move belongs to drain")
    if args.wait is not None and not args.action:
        raise InputError("--wait belongs to drain and resume")
    return None if args.wait is None else seconds(args.wait, "--wait")


def _change(args: argparse.Namespace) -> Mapping[str, Any] | None:
    if args.action is None:
        return None
    return {args.action: args.number, **({"move": True} if args.move else {})}


def _await(args: argparse.Namespace, found: list[dict[str, Any]], patience: float) -> list[dict[str, Any]]:
    """The replicas once that one is as it was asked to be.

    Raises InputError where that takes too long, and for one that was to serve and has failed.
    """
    from exeplan.errors import InputError

    deadline = time.monotonic() + patience
    while (state := found[args.number]["state"]) != _REACHED[args.action]:
        if args.action == "resume" and state in _ENDED:
            reason = found[args.number]["reason"] or f"it is {state}"
            raise InputError(f"replica {args.number} does not serve: {reason}")
        if time.monotonic() > deadline:
            raise InputError(f"replica {args.number} is {state} after {args.wait}; it goes on with that")
        time.sleep(_LOOK_SECONDS)
        found = _ask(args, None)
    return found


def _ask(args: argparse.Namespace, change: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The replicas after a change. Raises InputError with the server's reason where it refuses, or does not answer."""
    import http.client
    import json
    import urllib.error
    import urllib.request

    from exeplan.errors import InputError
    from exeplan.runner.load import authorization, trusting

    key = args.api_key if args.api_key is not None else os.environ.get("EXEPLAN_API_KEY")
    body = None if change is None else json.dumps(change).encode()
    tls = urllib.request.HTTPSHandler(context=trusting(args.tls_ca))
    try:
        request = urllib.request.Request(f"{args.url.rstrip('/')}/replicas", body, authorization(key))
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), tls)
        with opener.open(request, timeout=_PATIENCE_SECONDS) as answer:
            found: list[dict[str, Any]] = json.load(answer)["replicas"]
            return found
    except urllib.error.HTTPError as error:
        raise InputError(_reason(args.url, error.code, error.read())) from None
    except urllib.error.URLError as error:
        raise InputError(f"{args.url} does not answer: {error.reason}") from None
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{args.url} is no server of exeplan: {error or type(error).__name__}") from None


def _reason(url: str, status: int, body: bytes) -> str:
    """What the server's error says."""
    import json

    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{url} has no replicas to show (HTTP status {status}); is it a server of exeplan?"
