"""Notifications to systemd for a unit with `Type=notify`: progress of loading, readiness, the end, and the watchdog.

Source: sd_notify(3), sd_watchdog_enabled(3).
"""

import contextlib
import os
import socket

_SEND_SECONDS = 0.2
"""How long systemd may take to make room for a notification, which is dropped then."""


def watchdog_seconds() -> float | None:
    """Within which systemd wants to hear `WATCHDOG=1`, or else ends this process; None where it does not."""
    meant_for, micros = os.environ.get("WATCHDOG_PID"), os.environ.get("WATCHDOG_USEC", "")
    if meant_for not in (None, str(os.getpid())) or not micros.isdecimal():
        return None
    return int(micros) / 1e6 or None


def notify(**assignments: str) -> None:
    """Sends assignments such as `READY=1` and `STATUS=...`; does nothing where systemd expects no notification."""
    if not (address := os.environ.get("NOTIFY_SOCKET")):
        return
    message = "\n".join(f"{name}={value}" for name, value in assignments.items())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel, contextlib.suppress(OSError):
        channel.settimeout(_SEND_SECONDS)
        channel.sendto(message.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
