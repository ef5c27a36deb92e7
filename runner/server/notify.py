"""What systemd is told of the server where its unit has `Type=notify`: how far it is, that it is ready, that it ends.

Source: sd_notify(3). Not here: a watchdog; whether work gets on is what `/ready` is asked for.
"""

import contextlib
import os
import socket


def notify(**assignments: str) -> None:
    """Tells `READY=1`, `STATUS=...` and the like; nothing where nobody asked to be told."""
    if not (address := os.environ.get("NOTIFY_SOCKET")):
        return
    message = "\n".join(f"{name}={value}" for name, value in assignments.items())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel, contextlib.suppress(OSError):
        channel.sendto(message.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
