"""Check types as beartype does, and remember the checks.

The import hook of tests/conftest.py decorates a function inside another function each time the outer one runs. beartype
writes and compiles a new check each time, which took a tenth of the time of a step's test, and more of a planner's.
"""

from collections.abc import Callable, Hashable

from beartype import beartype

_checks: dict[Hashable, Callable] = {}


def check(function: Callable) -> Callable:
    """Return beartype's check for `function`, whose body jaxtyping has replaced: it has arguments and types alone."""
    if not hasattr(function, "__code__") or function.__defaults__ or function.__kwdefaults__:
        return beartype(function)
    key = function.__module__, function.__qualname__, function.__code__, tuple(function.__annotations__.items())
    try:
        known = _checks.get(key)
    except TypeError:  # a type that has no hash
        return beartype(function)
    if known is None:
        known = _checks[key] = beartype(function)
    return known
