"""Count what the compiled step stores and reads in memory, from programs for GPUs that are not present."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import prod

import jax
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from bench.accelerator import AUTOTUNING, TUNED
from bench.throughput import Sizes, sized
from configs import plain
from hosts.topology import machines
from model import parallel
from options.schema import BatchConfig, Config, MeshConfig, ModelConfig, with_options
from system.errors import UserError
from tests.tools.programs.links import LINKS
from tools.programs.compiled import Instruction, compile_step, names, numbers, read_program, type_bytes, visits
from tools.programs.topologies import devices_of
from training.build import build

DEPTH, ROWS, LENGTH, WIDTH, HEAD, VOCAB = 2, 4, 512, 256, 128, 24576
TOKENS = ROWS * LENGTH

pytestmark = pytest.mark.slow


@cache
def compiled(config: Config, topology: str = "h200:1") -> jax.stages.Compiled:
    pytest.importorskip("jax_cuda13_plugin")
    return compile_step(build(config, devices_of(topology)))


def small(**model) -> Config:
    network = {"depth": DEPTH, "width": WIDTH, "heads": 2, "kv_heads": 2, "head_dim": HEAD, "vocab_size": VOCAB}
    batch = BatchConfig(sequence_length=LENGTH, tokens_per_step=2 * TOKENS, rows_per_device=ROWS)
    return Config(name="test", model=ModelConfig(**network | model), batch=batch)


def kernels(hlo_text: str) -> Iterator[tuple[Instruction, int, list[str]]]:
    """Yield instructions that read or write memory, how often a step, and the types of what each reads."""
    program, entry = read_program(hlo_text)
    for name, times, _, caller in visits(program, entry, entry):
        types = {instruction.name: instruction.type for instruction in program[name]}
        for i in program[name] if name == caller else []:  # values inside a fusion stay in registers
            if i.opcode not in LINKS and not i.opcode.endswith(("-done", "-update")):
                yield i, times, [types[operand] for operand in set(names(i.operands)) & types.keys()]


def passes(**model) -> list[tuple[Instruction, list[str], list[str]]]:
    """Return the instructions of a small step that access memory, each with the arrays that it writes and reads."""
    arrays = lambda *types: re.findall(r"\w+\[[\d,]*\]", " ".join(types))
    return [(i, arrays(i.type), arrays(*reads)) for i, _, reads in kernels(compiled(small(**model)).as_text())]


def elements(array: str) -> int:
    return prod(numbers(array.split("[")[1]))


def of_size(size: int, arrays: list[str]) -> list[str]:
    """Return the element types of the arrays with `size` elements, whatever their shape."""
    return [array.split("[")[0] for array in arrays if elements(array) == size]


def test_logits_are_bfloat16_and_passed_over_seven_times_and_in_chunks_never_whole():
    """Logits are written, and read for the sum of exponentials and for the targets' own. Their gradient reads and
    writes them, and two products read it."""
    writes = [dtype for _, written, _ in passes(depth=1) for dtype in of_size(TOKENS * VOCAB, written)]
    reads = [dtype for _, _, read in passes(depth=1) for dtype in of_size(TOKENS * VOCAB, read)]
    assert writes == 2 * ["bf16"] and reads == 5 * ["bf16"]
    in_chunks = [array for _, written, _ in passes(depth=1, loss_chunks=4) for array in written]
    assert not of_size(TOKENS * VOCAB, in_chunks) and {*of_size(TOKENS * VOCAB // 4, in_chunks)} == {"bf16"}


def test_attention_runs_in_cudnn_without_transposing_heads():
    """Nothing is transposed, repeated or copied around it, in a block with a window and one without, and no array has
    the scores. cuBLAS adds a product to a copy of the stream, which is wider here than the heads."""
    program = passes(kv_heads=1, window_pattern="SL", short_window=128, width=384)
    assert sum("__cudnn$fmha" in i.attributes for i, _, _ in program) == 2 * DEPTH
    heads = {TOKENS * HEAD * n for n in (1, 2)}
    for i, written, _ in program:
        assert not [array for array in written if f"{LENGTH},{LENGTH}]" in array], i
        moved = re.search("transpose|copy", f"{i.opcode} {i.name} {i.attributes.split(' metadata=')[0]}")
        assert not (moved and heads & set(map(elements, written))), i


@pytest.mark.parametrize("capability", [7.5, 12.0])
def test_cards_of_each_compute_capability_compile_with_their_kernel_and_type(capability, monkeypatch):
    """T4 multiplies float32 in our own kernel; from Ampere on, cuDNN takes bfloat16."""
    for module, name in ((parallel, "described_capability"), (fused_attention_stablehlo, "check_compute_capability")):
        monkeypatch.setattr(module, name, getattr(module, name))  # restores it after the test
    kind = next(machine.kind for machine in machines().values() if machine.capability == capability)
    program = compiled(small(depth=1, vocab_size=1024), f"{kind}:1").as_text()
    assert ("__cudnn$fmha" in program) == ("bf16[" in program) == (capability >= 8)
    with pytest.raises(UserError, match=r"7\.5 and later, not 7\.0"):
        devices_of("v100:1")


def scatters(config: Config) -> list[tuple[str, bool]]:
    """Return for each scatter in the step the type that it writes, and whether its indices are unique."""
    program, _ = read_program(compiled(config).as_text())
    ops = [i for instructions in program.values() for i in instructions if i.opcode == "scatter"]
    return [(i.type.split("[")[0], "unique_indices=true" in i.attributes) for i in ops]


def test_sums_have_a_fixed_order():
    """Gradients of tables, value embeddings' included, are sums of products. Only numbers of rows are scattered, each
    to a place of its own."""
    types = scatters(small(value_embeddings=True))
    assert types and set(types) == {("s32", True)}


def test_xla_gets_the_deterministic_option(monkeypatch):
    """XLA would rewrite a scatter-add of the network. The same option makes cuDNN's backward attention deterministic
    (`RequireDeterminism` in XLA's cudnn_custom_call_compiler.cc), but only on a GPU."""
    monkeypatch.setattr("model.layers.platform", lambda: "cpu")
    config = replace(small(depth=1, vocab_size=1024), deterministic=True)
    assert set(scatters(config)) == {("f32", True)}


def test_memory_and_passes_of_d12():
    """Measured when written, with logits in two chunks: 19.24 GiB, and at most 703 GB of passes outside of products and
    attention. With activations in float32: 24.5 GiB and 894 GB in one chunk. nanochat's peak is 28.1 GiB."""
    config = plain.of_depth(12)
    config = sized(replace(config, model=replace(config.model, loss_chunks=2)), Sizes(32, 8), 1)
    program = compiled(config)
    memory = program.memory_analysis()
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < 19.3 * 2**30
    elementwise = lambda i: i.opcode != "custom-call" and not re.search("gemm|cublas|dynamic_slice_fusion", str(i))
    moved = [n * sum(map(type_bytes, (i.type, *reads))) for i, n, reads in kernels(program.as_text()) if elementwise(i)]
    assert sum(moved) < 710e9
    assert program.as_text().count('"epilogue":"RELU"') >= 12  # cuBLAS takes relu


def test_options_that_wait_for_a_gpu_to_time_them():
    """Muon's fewer passes are three products of TF32 for each in float32."""
    config = small(depth=1, vocab_size=1024)
    muon = {"optimizer.matrices.kind": "muon", "optimizer.muon.products": "fewer_passes"}
    text = compiled(with_options(config, muon)).as_text()
    assert sum("ALG_DOT_TF32_TF32_F32" in line for line in text.splitlines()) == 2 * 3 * 3  # stacks, products, passes


def test_a_choice_that_was_not_timed_is_an_error_when_only_timed_ones_are_allowed(tmp_path):
    """XLA knows the options of bench.accelerator's parts. Without a GPU the first times nothing, and keeps nothing."""
    pytest.importorskip("jax_cuda13_plugin")
    built = build(small(depth=1, vocab_size=1024), devices_of("h100:1"))

    def compile_with(part: str) -> None:
        flags = (
            (AUTOTUNING.format(folder=tmp_path) + TUNED[part][1]).replace("=true", "=True").replace("=false", "=False")
        )
        with jax.sharding.use_abstract_mesh(built.mesh.abstract_mesh):
            lowered = built.train_step.lower(built.abstract_state, built.abstract_batch())
        lowered.compile(dict(flag.removeprefix("--").split("=") for flag in flags.split()))

    compile_with("tuned")
    with pytest.raises(jax.errors.JaxRuntimeError, match="No cached config found for HLO instr"):
        compile_with("deterministic as tuned")


def temporaries(config: Config) -> int:
    """Return a step's bytes besides its arguments. It is compiled each time, since tests change the network."""
    return compiled.__wrapped__(config, f"h200:{config.mesh.fsdp}").memory_analysis().temp_size_in_bytes


def test_with_fsdp_products_are_not_delayed_to_the_end(monkeypatch):
    """It takes 41 MB; left to itself, XLA takes 67."""
    config = small(depth=3, remat="block", vocab_size=1024)
    batch = replace(config.batch, tokens_per_step=2 * config.batch.tokens_per_step)
    config = replace(config, batch=batch, mesh=MeshConfig(fsdp=2))
    ours = temporaries(config)
    for module in ("layers", "loss"):
        monkeypatch.setattr(f"model.{module}.order_gradients", lambda dx, dkernel: (dx, dkernel))
    assert ours < 0.75 * temporaries(config)


def test_remat_products_keeps_at_most_three_quarters_of_what_none_keeps():
    """A block more takes 11.1 MB instead of 17.4: a small network's peak is not in its blocks. (XLA for CPUs ignores
    recomputation.)"""
    of = lambda remat, depth: temporaries(small(vocab_size=1024, remat=remat, depth=depth))
    assert of("products", 2) - of("products", 1) <= 0.75 * (of("none", 2) - of("none", 1))


def test_backward_attentions_of_a_program_are_unequal():
    """With --deterministic, XLA sets cuDNN's deterministic flag for the first of equal calls only, and the program
    fails in its first step. On an H100, every network of two layers or more did (JAX 0.11.2)."""
    config = replace(small(vocab_size=1024, remat="block"), mesh=MeshConfig(fsdp=8))
    config = replace(config, batch=replace(config.batch, tokens_per_step=2 * TOKENS * 8))
    text = compiled(config, "h200:8").as_text()
    calls = [line for line in text.splitlines() if "__cudnn$fmhaSoftmaxBackward" in line]
    assert len({line.split("backend_config=")[1] for line in calls}) == len(calls) == DEPTH
