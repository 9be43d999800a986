"""The message of a run whose step does not fit the devices' memory."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from configs.schema import UserError
from hosts.machines import VECTOR_MEMORY, exceeds_vector_memory, machines, name_of
from training.candidate import topology_of


@contextmanager
def explain_out_of_memory(mistake: bool = False) -> Iterator[None]:
    """If the devices run out of memory inside, name the command that plans what would fit. With `mistake`, before any
    compute, raise a UserError; later, add a note to the error, which ends the run with code 1."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if exceeds_vector_memory(str(error)):
            raise UserError(f"{VECTOR_MEMORY}\n{str(error).splitlines()[0]}") from error
        if "RESOURCE_EXHAUSTED" in str(error):
            if mistake:
                raise UserError(f"{too_large(jax.devices())}\n{str(error).splitlines()[0]}") from error
            error.add_note(too_large(jax.devices()))
        raise


def too_large(devices: Sequence[Any]) -> str:
    """Return a message that a step does not fit the devices, with the command that plans what would fit."""
    kind = devices[0].device_kind
    too_much = f"the step needs more memory than a {kind} has"
    if (topology := topology_of(devices)).kind not in machines():
        return f"{too_much}; hosts/machines.toml describes no such device, so what would fit cannot be planned"
    words = [word for word in sys.argv[1:] if not word.startswith(("--accept", "--memory"))]
    plan = shlex.join(["python", "-m", "tools.plan", *words, f"--topology={name_of(topology)}"])
    return f"{too_much}. Its memory by part, and the nearest change that would fit: {plan}"
