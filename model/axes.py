"""The mesh's axes by name, without JAX."""

DATA = ("data_across", "data_major", "data_minor")
"""The axes that make up `data`: between slices or nodes, and two inside one (training/layout.py)."""
BATCH_AXES = (*DATA, "fsdp")
"""The axes that the rows of a batch are divided over."""
