"""Network interfaces of this machine by their addresses; Linux only.

gloo and NCCL take the name of an interface, and may listen on any of them unless they get one.
"""

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_SIOCGIFCONF = 0x8912
_RECORD = 40
"""Bytes of a `struct ifreq`: 16 of name, then the address."""


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def interface_of(address: str) -> str:
    """The interface with that numeric address. Raises OSError where there is none."""
    if is_loopback(address):
        return "lo"
    wanted = ipaddress.ip_address(address)
    for name, found in _interfaces():
        if found == wanted:
            return name
    raise OSError(f"no network interface has the address {address}")


def _interfaces() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    buffer = array.array("B", bytes(256 * _RECORD))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        length = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, request))[0]
    for record in (buffer.tobytes()[at : at + _RECORD] for at in range(0, length, _RECORD)):
        yield record[:16].rstrip(b"\0").decode().partition(":")[0], ipaddress.IPv4Address(record[20:24])
    version_6 = Path("/proc/net/if_inet6")
    for line in version_6.read_text().splitlines() if version_6.exists() else ():
        address, *_, name = line.split()
        yield name, ipaddress.IPv6Address(bytes.fromhex(address))
