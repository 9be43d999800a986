"""Let the processes of a run wait for each other, before JAX starts: the roll call.

JAX's own start (`initialization_timeout`) gives up with an abort, exit code 134, and names nobody. So process 0 first
listens on the coordinator's port. Each process connects, names itself, and answers once all are there. Then JAX's
service takes the port.
"""

import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_delay, wait_random

from configs.schema import UserError
from hosts.cluster import Cluster, split_address

START_TIMEOUT = 30 * 60  # seconds to wait for the last host: as long as a cluster takes to start it
TELL_EVERY = 60  # seconds between lines that name the missing processes


class PeerLost(Exception):
    """Raised if another process has stopped, or cannot be reached: start all again."""


def roll_call(
    cluster: Cluster,
    timeout: float = START_TIMEOUT,
    tell_every: float = TELL_EVERY,
    say: Callable[[str], Any] = lambda text: print(text, flush=True),
) -> None:
    """Return on every process once all have joined and answered. PeerLost, on those that are there, if one is missing
    after `timeout` seconds; every `tell_every` seconds each `say`s which. Raise UserError if their settings contradict
    each other."""
    host, port = split_address(cluster.address)
    if cluster.index == 0:
        _call(cluster, int(port), timeout, tell_every, say)
    else:
        _answer(cluster, (host, int(port)), timeout, tell_every, say)


def missing(cluster: Cluster, came: dict[int, str], silent: list[int]) -> str:
    """Return a line that names the processes that have not joined, or do not answer. `came`: each process's host."""
    name = lambda i: f"{i} ({came.get(i) or cluster.hosts[i]})" if i in came or cluster.hosts else str(i)
    absent = [name(i) for i in range(cluster.processes) if i not in came]
    parts = [f"process {', '.join(absent[:16])}{f' and {len(absent) - 16} others' if absent[16:] else ''}"] * bool(
        absent
    )
    parts += [f"an answer of process {', '.join(map(name, silent[:16]))}, which came"] * bool(silent)
    return " and ".join(parts)


def _call(cluster: Cluster, port: int, timeout: float, tell_every: float, say: Callable[[str], Any]) -> None:
    """Run process 0: let the others connect, ask each for an answer once all have, then release them."""
    start = reported = time.monotonic()
    server = _listen(port)
    lines: dict[socket.socket, bytes] = {}  # what a connection has sent of a line
    of: dict[int, socket.socket] = {0: server}
    came = {0: socket.gethostname()}
    answered = {0}

    def leave(connection: socket.socket) -> None:
        lines.pop(connection, None)
        selector.unregister(connection)
        connection.close()
        for index in [i for i, its in of.items() if its is connection]:
            del of[index], came[index]
            answered.discard(index)

    def tell(line: str) -> None:
        for connection in list(lines):
            try:
                connection.sendall(line.encode() + b"\n")
            except OSError:
                leave(connection)

    def heard(connection: socket.socket, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "yes":
            answered.update(i for i, its in of.items() if its is connection)
            return
        index, count, host = rest.split(" ", 2)
        if int(count) != cluster.processes:
            problem = f"process {index} on {host} expects {count} processes, process 0 {cluster.processes}"
            tell(f"no {problem}")
            raise UserError(problem)
        if int(index) in of:  # it restarted, and its old connection is not known to be gone yet; or there are two
            with suppress(OSError):
                of[int(index)].sendall(f"no another process, on {host}, is process {index} too\n".encode())
            leave(of[int(index)])
        of[int(index)], came[int(index)] = connection, host
        if len(of) == cluster.processes:
            tell("ready?")

    with server, selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while len(answered) < cluster.processes:
            now = time.monotonic()
            silent = [i for i in of if i not in answered] if len(of) == cluster.processes else []
            line = f"{now - start:.0f} s: waiting for {missing(cluster, came, silent)} of {cluster.processes}"
            if now - start > timeout:
                tell(f"lost {line}")
                raise PeerLost(line)
            if now - reported > tell_every:
                reported = now
                say(line)
                tell(f"say {line}")
            for key, _ in selector.select(min(1.0, tell_every)):
                connection: Any = key.fileobj
                if connection is server:
                    connection, _ = server.accept()
                    connection.settimeout(5)
                    lines[connection] = b""
                    selector.register(connection, selectors.EVENT_READ)
                    continue
                try:
                    more = connection.recv(4096)
                    if not more:
                        raise OSError
                    *whole, lines[connection] = (lines[connection] + more).split(b"\n")
                    for text in whole:
                        heard(connection, text.decode())
                except (OSError, ValueError):  # it left, or is not one of our processes: a port scanner
                    if connection in lines:
                        leave(connection)
        tell("go")
        for connection in list(lines):  # the side that closes first keeps the port for a while: not this one
            with suppress(OSError):
                while connection.recv(4096):
                    pass
            connection.close()


def _listen(port: int) -> socket.socket:
    """Listen on the port. Raise UserError if it stays taken."""
    again = Retrying(
        retry=retry_if_exception_type(OSError), stop=stop_after_delay(60), wait=wait_random(0.5, 1.5), reraise=True
    )
    try:
        return again(_create_server, port)  # the previous run may still be ending
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen on port {port} ({error.strerror}): is another run on this machine? "
            "JAX_COORDINATOR_PORT names another port, the same for all"
        ) from error


def _create_server(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server(("", port), backlog=4096)


def _answer(
    cluster: Cluster, address: tuple[str, int], timeout: float, tell_every: float, say: Callable[[str], Any]
) -> None:
    """Run any other process."""
    start = reported = time.monotonic()

    def waiting(state: RetryCallState) -> None:
        nonlocal reported
        now = time.monotonic()
        if now - reported > tell_every:
            reported = now
            problem = state.outcome and state.outcome.exception()
            say(f"{now - start:.0f} s: waiting for process 0 at {cluster.address}: {problem}")

    # Not there yet, not known yet, or restarted; or JAX's service of the previous run, whose answer is not text.
    again = Retrying(
        retry=retry_if_exception_type((OSError, UnicodeDecodeError)),
        stop=stop_after_delay(timeout),
        wait=wait_random(0.5, 1.5),
        before_sleep=waiting,
        reraise=True,
    )
    try:
        again(_greet, cluster, address, tell_every, say)
    except (OSError, UnicodeDecodeError) as problem:
        passed = time.monotonic() - start
        raise PeerLost(f"{passed:.0f} s: process 0 at {cluster.address} cannot be reached: {problem}") from problem


def _greet(cluster: Cluster, address: tuple[str, int], tell_every: float, say: Callable[[str], Any]) -> None:
    """Name this process, and do as process 0 says. Raise OSError if that one closes the connection."""
    with socket.create_connection(address, timeout=10) as connection:
        connection.settimeout(2 * tell_every + 10)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.sendall(f"here {cluster.index} {cluster.processes} {socket.gethostname()}\n".encode())
        for line in connection.makefile(encoding="utf-8"):
            word, _, rest = line.strip().partition(" ")
            if word == "go":
                return
            if word == "ready?":
                connection.sendall(b"yes\n")
            elif word == "say":
                say(rest)
            elif word == "no":
                raise UserError(rest)
            elif word == "lost":
                raise PeerLost(rest)
    raise ConnectionError("it closed the connection")
