"""Find ports for servers that a test starts in other processes."""

import random
import socket
from pathlib import Path

# The range is above well-known services, and below the ports that the kernel assigns to connections. So no connection
# takes a port between the search and the start of its server.
GIVEN_BY_KERNEL = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST, END = 16384, int(GIVEN_BY_KERNEL.read_text().split()[0]) if GIVEN_BY_KERNEL.exists() else 32768


def free_ports(count: int) -> list[int]:
    """Return ports on which nothing on this machine listens. They are random, since other tests look for ports too."""
    ports = []
    for port in random.SystemRandom().sample(range(FIRST, END), END - FIRST):
        with socket.socket() as free:
            try:
                free.bind(("", port))
            except OSError:
                continue
        ports.append(port)
        if len(ports) == count:
            break
    return ports
