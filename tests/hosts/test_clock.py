"""Test the clock of the time in which a process runs."""

from types import SimpleNamespace

from hosts.clock import RunningClock


def test_it_stands_while_the_process_is_stopped_but_not_while_it_works(monkeypatch):
    time = SimpleNamespace(now=100.0, worked=7.0)
    of_system = {"monotonic": lambda: time.now, "process_time": lambda: time.worked}
    monkeypatch.setattr("hosts.clock.time", SimpleNamespace(**of_system))
    monkeypatch.setattr(RunningClock, "_tick", lambda clock: None)
    clock = RunningClock()

    def passed(seconds: float, worked: float) -> float:
        """Return the seconds on the clock while `seconds` pass, of which the process worked some."""
        before = clock.seconds()
        time.now += seconds
        time.worked += worked
        return clock.seconds() - before

    assert passed(0.25, worked=0.0) == 0.25  # it waits for the devices
    assert passed(600.0, worked=0.1) == 0.25  # SIGSTOP
    assert passed(30.0, worked=30.0) == 30.0  # a C function that keeps Python's lock
    assert passed(600.0, worked=4.0) == 0.25  # SIGSTOP, just after all cores worked
    assert passed(1.5, worked=0.0) == 1.5  # a busy machine
