"""Ports for servers that a test starts in processes of their own."""

import random
import socket
from pathlib import Path

# Above the ports of well-known services, and below those that the kernel gives to connections of its own choice: none
# of them can take a port between the moment at which a test finds it free and that at which a server listens there.
GIVEN_BY_KERNEL = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST, END = 16384, int(GIVEN_BY_KERNEL.read_text().split()[0]) if GIVEN_BY_KERNEL.exists() else 32768


def free_ports(count: int) -> list[int]:
    """Ports at which nothing on this machine listens, drawn at random, since other tests draw theirs meanwhile."""
    found = []
    for port in random.SystemRandom().sample(range(FIRST, END), END - FIRST):
        with socket.socket() as free:
            try:
                free.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            break
    return found
