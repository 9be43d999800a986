"""What to say if the devices' memory does not hold a run."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from configs.schema import Config, UserError
from hosts.machines import VECTOR_MEMORY, exceeds_vector_memory
from tools.plan.measured import does_not_fit
from training.mesh import islands


@contextmanager
def explain_out_of_memory(config: Config, mistake: bool = False) -> Iterator[None]:
    """Where the devices' memory does not hold what is done inside, says what it is, and what would fit: a UserError
    before anything was computed (`mistake`), later a note on the error, which ends the run with code 1."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if exceeds_vector_memory(str(error)):
            raise UserError(f"{VECTOR_MEMORY}\n{str(error).splitlines()[0]}") from error
        if "RESOURCE_EXHAUSTED" in str(error):
            devices = jax.devices()
            why = does_not_fit(config, devices[0].device_kind, len(devices), len(islands(devices)))
            if mistake:
                raise UserError(f"{why}\n{str(error).splitlines()[0]}") from error
            error.add_note(why)
        raise
