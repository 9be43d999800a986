"""The sizes of a training step that the programs of bench/ let a user choose."""

from dataclasses import dataclass, replace

from configs.schema import Config, Positive, UserError
from configs.validation import validate


@dataclass(frozen=True)
class Sizes:
    """Sizes that replace the config's."""

    depth: Positive[int] | None = None
    """Blocks; the width becomes 64 x depth, rounded up to whole heads, as in nanochat."""
    rows: Positive[int] | None = None
    """Rows of a micro-batch on one device."""
    micro_batches: Positive[int] | None = None
    """Micro-batches of a step."""


def sized(config: Config, sizes: Sizes, devices: int) -> Config:
    """Return the config with the sizes of the command line. Raise UserError as for a config."""
    model, batch = config.model, config.batch
    if sizes.depth:
        heads = -(-64 * sizes.depth // model.head_dim)
        model = replace(model, depth=sizes.depth, width=heads * model.head_dim, heads=heads, kv_heads=heads)
    if sizes.rows or sizes.micro_batches:
        rows = sizes.rows or batch.rows_per_device
        if rows == "auto":
            raise UserError(f"--micro_batches={sizes.micro_batches} needs --rows: together they make the step's size")
        # If tensor does not divide the devices, the mesh is refused.
        unit = rows * max(devices // config.mesh.tensor, 1) * batch.sequence_length
        micro_batches = sizes.micro_batches or max(batch.tokens_per_step // unit, 1)
        batch = replace(batch, rows_per_device=rows, tokens_per_step=unit * micro_batches, ramp="")
    config = replace(config, model=model, batch=batch)
    validate(config)
    return config
