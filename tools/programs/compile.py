"""The training step, compiled ahead of time from shapes alone."""

from typing import Any

import jax

from training.build import Build


def compile_step(built: Build, **options: Any) -> Any:
    """The training step for the build's mesh, whose devices need not be there; `options`: XLA's."""
    with jax.sharding.use_abstract_mesh(built.mesh.abstract_mesh):  # whose devices choose the kernels
        return built.train_step.lower(built.abstract_state, built.abstract_batch()).compile(options)
