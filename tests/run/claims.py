"""Claim a run's folder as a start does."""

from typing import Any
from unittest.mock import Mock

from options.schema import Config
from run.folder import RunFolder
from run.status import claim_folder


def claim(config: Config, fingerprint: str = "print", accept_changes: bool = False) -> list[str]:
    """Claim the run's folder for a text with this fingerprint, and return the changed options."""
    material: Any = Mock(fingerprint=fingerprint)
    return claim_folder(RunFolder(config.run_dir), config, material, accept_changes).changes
