"""Connect the processes of a run: they exchange values, and end with one code.

JAX's coordination service carries both. The first process that ends alone (an exception, a Ctrl-C, a hang) writes its
exit code there, and the others end with it.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from typing import Any, NoReturn

import jax
from jax._src import distributed  # as Orbax does: the service's store has no public API

from configs.command_line import Exit
from hosts.cluster import START_TIMEOUT, TELL_EVERY, Cluster, PeerLost, named, roll_call, split_address

TELL_FIRST = 10  # seconds until a line names a joined process that does not answer
JOIN_TIMEOUT = 120  # seconds for JAX's start, once all have come
HEARTBEAT_TIMEOUT = 30  # seconds without a heartbeat after which a process counts as lost
DIRECT = "no_grpc_proxy"  # hosts that gRPC reaches without a proxy; it replaces no_proxy
HOSTS = "tokensum/host"  # in the service's store: each process's host
EXCHANGES = "tokensum/exchange"  # also there: the values that processes exchange
ENDING = "tokensum/exit"  # also there: the code, and the first process that ended with it
LOOK_EVERY = 1  # seconds between reads of it
GRACE = 2  # seconds in which a process that reads it may end by itself, with its own message


def join(cluster: Cluster) -> None:
    """Wait for all, then start JAX's service. Raise PeerLost if one does not join; UserError for contradictory
    settings."""
    roll_call(cluster)
    end_aborts_as_lost_peers()
    _joining.set()
    if os.environ.keys() & {"grpc_proxy", "https_proxy", "http_proxy"}:  # gRPC would ask it for the coordinator
        direct = os.environ.get(DIRECT) or os.environ.get("no_proxy", "")
        os.environ[DIRECT] = f"{direct},{split_address(cluster.address)[0]}".strip(",")
    jax.distributed.initialize(
        cluster.address,
        cluster.processes,
        cluster.index,
        local_device_ids=cluster.local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=JOIN_TIMEOUT,
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
    )
    _joining.clear()
    client: Any = distributed.global_state.client
    client.key_value_set(f"{HOSTS}/{cluster.index}", socket.gethostname())
    _watcher.start()


def leave() -> None:
    """Leave JAX's service together with the others, for which it waits, and stop reading their exit codes. Python
    aborts if it ends while a thread is in JAX's C++ (`FATAL: exception not rethrown`)."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
        _left.set()
        _watcher.join()


patience: float = START_TIMEOUT
"""Seconds that `exchange` waits for a process. `hosts.stop.limited` sets its own limit."""
_numbers = defaultdict[str, Iterator[int]](lambda: count(1))
"""Numbers of the exchanges of each channel. Every process counts them alike, so that no two share a name."""


def exchange(what: str, value: str, channel: str = "") -> list[str]:
    """Return every process's `value`, in order, through JAX's service, not through the devices. PeerLost, with their
    names, if some have not given theirs after `patience` seconds. Every process must call it. A thread other than the
    main one needs its own channel, which waits without limit."""
    state = distributed.global_state
    client: Any = state.client
    if client is None:
        return [value]
    number = next(_numbers[channel])
    name = f"{EXCHANGES}{channel}/{number}"
    client.key_value_set(f"{name}/{state.process_id}", value)
    if state.process_id > 0:  # the first gathers them, so that the requests grow with the processes, not their square
        return json.loads(_read(client, name, "all", what, channel))
    values = [_read(client, name, str(i), what, channel) for i in range(state.num_processes)]
    client.key_value_set(f"{name}/all", json.dumps(values))
    client.key_value_delete(f"{EXCHANGES}{channel}/{number - 1}")  # all have come here, so they have read it
    return values


def _read(client: Any, name: str, key: str, what: str, channel: str) -> str:
    """Return the value at `key` once it is there. Meanwhile the first process names the processes without one."""
    start, processes = time.monotonic(), distributed.global_state.num_processes
    by_process = lambda folder: {key.rpartition("/")[2]: value for key, value in client.key_value_dir_get(folder)}
    while True:
        passed = time.monotonic() - start
        try:
            milliseconds = 1000 * (TELL_EVERY if passed > TELL_FIRST else TELL_FIRST)
            return client.blocking_key_value_get(f"{name}/{key}", milliseconds)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        given, hosts = by_process(f"{name}/"), by_process(f"{HOSTS}/")
        silent = [i for i in range(processes) if str(i) not in given]
        names = named(silent or [0], {int(i): host for i, host in hosts.items()})
        passed = time.monotonic() - start
        line = f"{passed:.0f} s: waiting for {what} of process {names} of {processes}"
        if passed > patience and not channel:
            raise PeerLost(line)
        if distributed.global_state.process_id == 0:
            print(line, flush=True)


def end_all(code: int, reason: str) -> NoReturn:
    """End this process and all others of the run with `code`, or with the code of the one that ended first. An orderly
    end would wait for them."""
    client = distributed.global_state.client
    for output in (sys.stdout, sys.stderr):
        with suppress(OSError):  # its disk is full, or nobody reads it
            output.flush()
    if client is not None:
        with suppress(Exception):  # another was first, or the service is gone: then they end with 42
            client.key_value_set(ENDING, f"{int(code)} {distributed.global_state.process_id} {reason}")
        with suppress(Exception):
            code = int(client.key_value_try_get(ENDING).split()[0])
        _acknowledge(client, code)
    os._exit(code)


def _acknowledge(client: Any, code: int) -> None:
    """Announce that this process ends too. Process 0 has the service, so it waits until all others have done so. An
    abort of JAX's client before this process has ended must not change its code."""
    global _ending
    state, _ending = distributed.global_state, code
    with suppress(Exception):
        client.key_value_set(f"{ENDING}-known/{state.process_id}", "")
        until = time.monotonic() + 10 * GRACE
        while state.process_id == 0 and time.monotonic() < until:
            if len(client.key_value_dir_get(f"{ENDING}-known/")) == state.num_processes:
                break
            time.sleep(0.1)


def _end_with_others() -> None:
    """Check every second, in a thread, whether another process has ended the run, until this one has left it."""
    client: Any = distributed.global_state.client
    while not _left.wait(LOOK_EVERY):
        with suppress(Exception):
            code, index, reason = client.key_value_try_get(ENDING).split(" ", 2)
            time.sleep(GRACE)
            print(f"error: process {index} ended the run: {reason}", file=sys.stderr, flush=True)
            _acknowledge(client, int(code))
            os._exit(int(code))


_left = threading.Event()
_watcher = threading.Thread(target=_end_with_others, daemon=True)

_joining = threading.Event()  # set while JAX's client connects to the service
_abort_handler: Any = None  # kept, since C keeps no reference
_ending: int | None = None  # the code with which this process is about to end


def end_aborts_as_lost_peers() -> None:
    """Turn the abort of JAX's client, which has lost another process, into an exit with 42.

    The abort happens in a C++ thread, or in the process's own thread while it joins the others. Any other abort in a
    Python thread, such as a failed check of the compiler, stays an abort.
    (jaxlib has a callback for it, `missed_heartbeat_callback`, and cannot call it: std::bad_cast, seen in 0.10.2.)
    """
    global _abort_handler

    def ended(_: int) -> None:
        if not (_joining.is_set() or isinstance(threading.current_thread(), threading._DummyThread)):
            return  # abort() then ends the process
        if _ending is not None:
            os._exit(_ending)
        os.write(2, b"error: another process of the run was lost (JAX's message is above); start all again\n")
        os._exit(Exit.PEER_LOST)

    kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, kind], ctypes.c_void_p
    _abort_handler = kind(ended)
    libc.signal(signal.SIGABRT, _abort_handler)
