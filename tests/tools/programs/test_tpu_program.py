"""Count what the compiled step stores and reads in memory, from the program of a TPU slice."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from model.kernels import attention_kernel, splash_attention
from options.schema import BatchConfig, Config, ModelConfig
from tests.tools.programs.links import LINKS
from tools.programs.compiled import Instruction, compile_step, names, read_program, visits
from tools.programs.topologies import devices_of
from training.build import build

DEPTH, ROWS, LENGTH, VOCAB = 1, 2, 512, 24576
pytestmark = pytest.mark.slow
LOGITS = f"[{ROWS * LENGTH},{VOCAB}]"


@cache
def scheduled(**model: int) -> tuple[list[Instruction], int]:
    """Return the instructions that write arrays to memory, fusions' insides excluded, and the temporaries' bytes."""
    pytest.importorskip("libtpu")
    network = {"depth": DEPTH, "width": 256, "heads": 2, "kv_heads": 2, "head_dim": 128, "vocab_size": VOCAB}
    batch = BatchConfig(sequence_length=LENGTH, tokens_per_step=4 * 2 * ROWS * LENGTH, rows_per_device=ROWS)
    config = Config(name="test", model=ModelConfig(**network | model), batch=batch)  # pyright: ignore
    compiled = compile_step(build(config, devices_of("v5e:2x2")))
    program, entry = read_program(compiled.as_text())
    of_memory = {name for name, _, _, caller in visits(program, entry, entry) if name == caller}
    arrays = [instruction for name in sorted(of_memory) for instruction in program[name]]
    return arrays, compiled.memory_analysis().temp_size_in_bytes


def produced(shape: str, arrays: list[Instruction]) -> list[str]:
    """Return the types of the arrays of that shape that are written."""
    return [
        dtype
        for instruction in arrays
        if instruction.opcode not in LINKS
        for dtype in re.findall(rf"(\w+){re.escape(shape)}", instruction.type)
    ]


def test_logits_are_written_once_in_the_compute_type_and_read_by_two_products():
    """The sum of exponentials is computed while they are written, and the gradient while it is multiplied."""
    arrays, _ = scheduled()
    assert produced(LOGITS, arrays) == ["bf16"]
    logits = {i.name for i in arrays if i.opcode == "get-tuple-element" and LOGITS in i.type}
    readers = [i for i in arrays if logits & set(names(i.operands))]
    assert len(logits) == 1 and 1 <= len(readers) <= 3  # the look-up of the targets' logits included


def test_in_chunks_the_logits_never_exist_whole():
    arrays, memory = scheduled(loss_chunks=4)
    assert produced(LOGITS, arrays) == []
    assert "bf16" in produced(f"[{ROWS * LENGTH // 4},{VOCAB}]", arrays)
    whole = 2 * ROWS * LENGTH * VOCAB
    assert memory < scheduled()[1] - whole / 4  # a quarter of them remains, with the sum of the head's gradients


def test_attention_runs_in_its_kernel_and_no_array_has_its_scores():
    arrays, _ = scheduled()
    kernels = [i for i in arrays if i.opcode == "custom-call" and "tpu_custom_call" in i.attributes]
    assert len(kernels) == 3 * DEPTH  # forward, gradients of queries, gradients of keys and values
    assert not [i for i in arrays if f"{LENGTH},{LENGTH}]" in i.type]


def test_sums_over_heads_are_products():
    """Expect two per block forward, for the norms of queries and keys, and two backward. None sums along the lanes."""
    made = [i for i in scheduled()[0] if i.opcode == "fusion" and i.type.startswith(f"f32[{ROWS},{LENGTH},2]")]
    sums = [i for i in made if re.search(r"(reduce_sum|dot_general)\"", i.attributes)]
    assert len(sums) == 4 * DEPTH and all('dot_general"' in i.attributes for i in sums)


def test_no_mask_of_the_mlp_is_kept():
    assert not [i for i in scheduled()[0] if re.search(rf"(pred|u8)\[{ROWS},{LENGTH},1024\]", i.type)]


@pytest.mark.parametrize(("topology", "documents", "length"), [("v5e:2x2", True, 16384), ("v5p:2x2x1", False, 32768)])
def test_attention_over_long_rows_compiles(topology, documents, length):
    """A kernel with complete rows of keys exceeded a core's vector memory. It takes one head at a time."""
    pytest.importorskip("libtpu")
    assert attention_kernel("tpu", 0.0, "bfloat16", length, 128, documents) == "splash"
    on_device = {"sharding": SingleDeviceSharding(devices_of(topology)[0])}
    q = jax.ShapeDtypeStruct((1, length, 1, 128), jnp.bfloat16, **on_device)
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32, **on_device) if documents else None
    summed = lambda q, k, v, segments: splash_attention(q, k, v, segments, None).sum().astype(jnp.float32)
    program = jax.jit(jax.grad(summed, (0, 1, 2))).lower(q, q, q, segments).compile()
    assert (
        program.as_text().count("tpu_custom_call") == 3
    )  # forward, gradients of queries, gradients of keys and values
