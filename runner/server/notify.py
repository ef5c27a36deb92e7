"""Notifications to systemd for a unit with `Type=notify`: the progress of loading, readiness, and the end.

Source: sd_notify(3). Not here: a watchdog; `/ready` reports whether the engine makes progress.
"""

import contextlib
import os
import socket


def notify(**assignments: str) -> None:
    """Sends assignments such as `READY=1` and `STATUS=...`; does nothing where systemd expects no notification."""
    if not (address := os.environ.get("NOTIFY_SOCKET")):
        return
    message = "\n".join(f"{name}={value}" for name, value in assignments.items())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel, contextlib.suppress(OSError):
        channel.sendto(message.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
