"""What the programs of this folder are: python with_CLIENT.py BASE_URL MODEL; prints one JSON object a check."""

import json
from collections.abc import Callable


def run(*checks: Callable[[], bool]) -> None:
    """Prints what each has found; whatever the client raises is the result."""
    for check in checks:
        try:
            found: bool | str = check()
        except Exception as error:
            found = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps({"check": check.__name__.replace("_", " "), "found": found}), flush=True)
