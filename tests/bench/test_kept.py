"""What a block keeps for its backward pass, in programs compiled for a GPU. (XLA for CPUs ignores recomputation.)"""

from dataclasses import replace

import pytest

from bench.kept import kept_widths
from tests.helpers import tiny_config
from tools.programs.topologies import devices_of


@pytest.mark.slow
def test_remat_products_keeps_at_most_three_quarters_of_what_none_keeps():
    """5.8 widths, of 11.1."""
    pytest.importorskip("jax_cuda13_plugin")
    config = tiny_config(length=512, width=256, heads=2, kv_heads=2, head_dim=128, dtype="bfloat16")
    sized = lambda remat: replace(config, model=replace(config.model, remat=remat))
    device = devices_of("h200:1")[0]
    products, none = (kept_widths(sized(remat), device, (2, 4), (8, 24)) for remat in ("products", "none"))
    assert products <= 0.75 * none
