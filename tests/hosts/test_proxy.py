"""Test that processes join each other although the machine has a proxy for HTTP."""

from tests.hosts.processes import finish, start

JOIN = """
import jax
from hosts.runtime import run_command, start_jax
run_command(lambda: start_jax() or print("joined", jax.process_count()) or 0)
"""


def test_processes_join_past_a_proxy_that_does_not_know_them(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nothing listens there
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for output in finish(start(["-c", JOIN], ["-c", JOIN]), 0):
        assert "joined 2" in output
