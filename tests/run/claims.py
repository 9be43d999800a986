"""Claim a run's folder as a start does."""

from typing import Any
from unittest.mock import Mock

from data.order import ROW_ORDER
from options.schema import Config
from run.folder import RunFolder
from run.status import claim_folder


def text_of(fingerprint: str, row_order: int = ROW_ORDER) -> Any:
    """Return what a run learns from, as far as its record names it."""
    return Mock(fingerprint=fingerprint, row_order=row_order)


def claim(config: Config, fingerprint: str = "print", accept_changes: bool = False) -> list[str]:
    """Claim the run's folder for a text with this fingerprint, and return the changed options."""
    return claim_folder(RunFolder(config.run_dir), config, text_of(fingerprint), accept_changes).changes
