"""The message of a run whose step does not fit the devices' memory."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from configs.schema import UserError
from hosts.machines import VECTOR_MEMORY, exceeds_vector_memory, machine_of
from training.mesh import islands


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
    if not (topology := topology_of(devices)):
        return f"{too_much}; hosts/machines.toml describes no such device, so what would fit cannot be planned"
    words = [word for word in sys.argv[1:] if not word.startswith("--accept")]
    plan = shlex.join(["python", "-m", "tools.plan", *words, f"--topology={topology}"])
    return f"{too_much}. Its memory by part, and the nearest change that would fit: {plan}"


def topology_of(devices: Sequence[Any]) -> str:
    """Return the devices as `--topology` names them (`v5e:4x4`, `2x h200:8`); empty for an unknown kind."""
    machine, groups = machine_of(devices[0].device_kind), islands(devices)
    if machine is None:
        return ""
    shape = [len(groups[0])]
    if not machine.gpu:
        shape = [len({*along}) for along in zip(*(device.coords for device in groups[0]))][: machine.directions // 2]
    return f"{len(groups)}x " * (len(groups) > 1) + f"{machine.kind}:{'x'.join(map(str, shape))}"
