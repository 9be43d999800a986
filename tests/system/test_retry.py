"""Test which errors are retried, and for how long."""

import errno
import re
import ssl
import time
from datetime import UTC, datetime
from unittest.mock import Mock

import pytest
from gcsfs.retry import HttpError
from huggingface_hub.errors import OfflineModeIsEnabled

import system.files
from system.errors import StorageLost
from system.files import described, is_transient, with_retries


def wrapped(error: Exception) -> Exception:
    """Return the error as Orbax raises it from tensorstore's."""
    try:
        raise Exception("Encountered error while reading array index") from error
    except Exception as outer:
        return outer


def answered(**facts: object) -> Exception:
    """Return an error of a client's with these attributes."""
    error = Exception()
    error.__dict__.update(facts)
    return error


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [
        (OSError(errno.EIO, "Input/output error"), True),
        (TimeoutError(), True),
        (HttpError({"code": 503, "message": "try again"}), True),
        (wrapped(ValueError("UNAVAILABLE: Error opening driver")), True),
        (ValueError("DATA_LOSS: Error reading"), False),
        (ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device [os_error_code='28']"), False),
        (ValueError("RESOURCE_EXHAUSTED: HTTP 429: slower"), True),
        (HttpError({"code": 401, "message": "who are you"}), True),
        # Statuses as aiohttp and the hub's client store them.
        *((answered(status=status), may_pass) for status, may_pass in [(403, False), (502, True)]),
        (answered(response=Mock(status_code=404)), False),
        (ConnectionResetError(), True),
        (OfflineModeIsEnabled("HF_HUB_OFFLINE=1"), False),
        (OSError("Forbidden: https://storage.googleapis.com/..."), False),
        (OSError("not a file of this format"), False),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (KeyError("value_type"), False),
        (wrapped(ssl.SSLCertVerificationError("self-signed certificate")), False),
    ],
    ids=str,
)
def test_errors_of_disks_and_stores_are_passing_and_others_permanent(error, may_pass):
    assert is_transient(error) == may_pass


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        wrapped(ValueError(f"RESOURCE_EXHAUSTED: {'x' * 400}: No space left on device [os_error_code='28']")),
        ValueError("NOT_FOUND: Error opening driver [os_error_code='122']"),
    ],
    ids=["disk", "tensorstore", "quota"],
)
def test_a_full_disk_is_called_full(error):
    assert described(error).startswith("0 the disk is full (")
    assert described(OSError(errno.EIO, "no answer")) == "1 [Errno 5] no answer"


def failing(times: int, error: Exception):
    errors = [error] * times

    def function() -> str:
        if errors:
            raise errors.pop()
        return "done"

    return function


def test_passing_errors_are_retried_and_permanent_ones_raised(monkeypatch, capsys):
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)
    assert with_retries("the disk", failing(4, OSError(errno.EIO, "Input/output error"))) == "done"
    assert "the disk: [Errno 5] Input/output error; trying again" in capsys.readouterr().err
    with pytest.raises(PermissionError):
        with_retries("the disk", failing(1, PermissionError(errno.EACCES, "Permission denied")))


@pytest.mark.parametrize("asked", ["330", "Sat, 01 Jan 2000 00:05:30 GMT"])
def test_a_server_that_asks_for_a_longer_pause_gets_it(asked, monkeypatch, capsys):
    now = [datetime(2000, 1, 1, tzinfo=UTC).timestamp()]
    clock = Mock(wraps=time, monotonic=lambda: now[0], time=lambda: now[0])
    monkeypatch.setattr("tenacity.time", clock)
    monkeypatch.setattr("system.files.time", clock)
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: now.append(now.pop() + seconds))
    begun = now[0]

    def ask() -> str:
        if now[0] < begun + 330:
            raise answered(response=Mock(status_code=429, headers={"Retry-After": asked}))
        return "done"

    assert with_retries("the hub", ask) == "done" and now[0] < begun + 330 + system.files.LONGEST_PAUSE
    assert re.search(r"the hub: .*; trying again in 33\d s", capsys.readouterr().err)


def test_an_error_that_lasts_long_is_lost_storage(monkeypatch):
    monkeypatch.setattr(system.files, "RETRY_SECONDS", 0)
    with pytest.raises(StorageLost, match=r"the disk: .*Stale file handle"):
        with_retries("the disk", failing(3, OSError(errno.ESTALE, "Stale file handle")))
