"""Read what crosses the mesh from programs: from text, on eight CPU devices, and for real TPU slices."""

import re
import sys
from dataclasses import replace

import jax
import optax
import pytest

from bench import collectives as command
from model.gpt import parameter_counts
from options.schema import DATA_AXES, MeshConfig
from tests.helpers import built_on, tiny_config
from tools.programs.compiled import (
    SLICES,
    Collective,
    axes_crossed,
    collectives,
    estimated_cycles,
    replica_groups,
)
from training.mesh import sizes_of
from training.shares import on_each_device

MESH = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("notation", "axes"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
        ("replica_groups={{0,2},{1},{3},{4},{5},{6},{7}}", ("fsdp",)),
        ("replica_groups={}", ("data", "fsdp", "tensor")),
        ("replica_groups=[4,2]<=[8]", ("tensor",)),
        ("replica_groups=[8,1]<=[8]", ()),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", ("data", "tensor")),
        ("replica_groups=mesh['data'=2,'fsdp'=2,'tensor'=2] {'data','fsdp'}", ("data", "fsdp")),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0':(2)2}", ("fsdp",)),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", ("tensor",)),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'b'}", ("data",)),
        ("source_target_pairs={{0,2},{2,0},{1,3},{3,1}}", ("fsdp",)),
    ],
)
def test_groups_in_every_notation_cross_the_right_axes(notation, axes):
    attributes = f", channel_id=1, {notation}, use_global_device_ids=true"
    assert axes_crossed(replica_groups(attributes, 8), MESH) == axes


HLO = """HloModule hand_written, num_partitions=8

%scattered (p: f32[64]) -> f32[32] {
  %p = f32[64]{0} parameter(0)
  ROOT %rs = f32[32]{0} reduce-scatter(%p), channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}
}

%link.1 (q: bf16[8]) -> bf16[16] {
  %q = bf16[8]{0} parameter(0)
  ROOT %ag.1 = bf16[16]{0} all-gather(%q), channel_id=1, replica_groups=[4,2]<=[8], frontend_attributes={chain_id="7"}
}

%link.2 (q2: bf16[8]) -> bf16[16] {
  %q2 = bf16[8]{0} parameter(0)
  ROOT %ag.2 = bf16[16]{0} all-gather(%q2), channel_id=1, replica_groups=[4,2]<=[8], frontend_attributes={chain_id="7"}
}

%inner_condition (s: (s32[], f32[16])) -> pred[] {
  %s = (s32[], f32[16]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %three), direction=LT
}

%inner_body (t: (s32[], f32[16])) -> (s32[], f32[16]) {
  %t = (s32[], f32[16]{0}) parameter(0)
  %j = s32[] get-tuple-element(%t), index=0
  %x = f32[16]{0} get-tuple-element(%t), index=1
  %ar = f32[16]{0} all-reduce(%x), channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, \
metadata={op_name="jit(f)/while/body/psum"}
  %work = f32[16]{0} multiply(%ar, %ar), backend_config={"estimated_cycles":"10"}
  ROOT %u = (s32[], f32[16]{0}) tuple(%j, %work)
}

%outer_body (v: (s32[], f32[16])) -> (s32[], f32[16]) {
  %v = (s32[], f32[16]{0}) parameter(0)
  %w = (s32[], f32[16]{0}) while(%v), condition=%inner_condition, body=%inner_body
  %y = f32[16]{0} get-tuple-element(%w), index=1
  %b8 = bf16[8]{0} constant({...})
  %f1 = bf16[16]{0} fusion(%b8), kind=kCustom, calls=%link.1, backend_config={"estimated_cycles":"100"}
  %f2 = bf16[16]{0} fusion(%b8), kind=kCustom, calls=%link.2
  %k = s32[] get-tuple-element(%w), index=0
  ROOT %z = (s32[], f32[16]{0}) tuple(%k, %y)
}

ENTRY %main (in: (s32[], f32[16])) -> f32[16] {
  %in = (s32[], f32[16]{0}) parameter(0)
  %loop = (s32[], f32[16]{0}) while(%in), condition=%inner_condition, body=%outer_body, \
backend_config={"known_trip_count":{"n":"5"}}
  %r = f32[16]{0} get-tuple-element(%loop), index=1
  %n = s32[] get-tuple-element(%loop), index=0
  %ars = (f32[16]{0}, s32[]) all-reduce-start(%r, /*index=1*/%n), channel_id=1, replica_groups={}
  %ard = (f32[16]{0}, s32[]) all-reduce-done(%ars)
  %ags = (f32[16]{0}, f32[32]{0}) all-gather-start(%r), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
  %agd = f32[32]{0} all-gather-done(%ags)
  %big = f32[64]{0} broadcast(%r), dimensions={0}, backend_config={"estimated_cycles":"1"}
  %rss = ((f32[64]{0}), f32[32]{0}, u32[]) async-start(%big), calls=%scattered
  %rsu = ((f32[64]{0}), f32[32]{0}, u32[]) async-update(%rss), calls=%scattered
  %rsd = f32[32]{0} async-done(%rsu), calls=%scattered
  %cps = (f32[16]{0}, f32[16]{0}, u32[], u32[]) collective-permute-start(%r), source_target_pairs={{0,2},{2,0}}
  %cpd = f32[16]{0} collective-permute-done(%cps)
  %alone = f32[16]{0} all-reduce(%r), channel_id=1, replica_groups=[8,1]<=[8]
  %norm = f32[16]{0} all-reduce(%r), channel_id=1, replica_groups=[4,2]<=[8], metadata={op_name="jit(f)/reduce_sum"}
  %token = token[] after-all()
  %sent = (f32[16]{0}, u32[]{:S(2)}, token[]) send(%r, %token), channel_id=2, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_rendezvous="all_to_all.1_0",_xla_megascale_transfer_type="ALL_TO_ALL"}
  %moved = (f32[16]{0}, u32[]{:S(2)}, token[]) send(%r, %token), channel_id=3, is_host_transfer=true, \
frontend_attributes={_xla_megascale_transfer_type="ONE_TO_ONE",is_spmd_generated="true"}
  ROOT %out = f32[16]{0} add(%cpd, %alone)
}
"""


def test_every_kind_counts_once_with_its_bytes_and_its_loops():
    """XLA's partitioner made a reduction of a divided array, and moved one between slices."""
    everywhere = ("data", "fsdp", "tensor")
    expected = [
        Collective("all-reduce", "f32+s32", everywhere, False, 1, 68),
        Collective("all-gather", "f32", ("data",), False, 1, 128),
        Collective("collective-permute", "f32", ("fsdp",), False, 1, 64),
        Collective("all-reduce", "f32", ("tensor",), False, 1, 64, written=False),
        Collective("all-to-all", "f32", SLICES, False, 1, 64),
        Collective("collective-permute", "f32", SLICES, False, 1, 64, written=False),
        Collective("all-reduce", "f32", ("data",), True, 15, 64),
        Collective("all-gather", "bf16", ("tensor",), True, 5, 32),
        Collective("reduce-scatter", "f32", ("tensor",), False, 1, 256),
    ]
    assert collectives(HLO, MESH) == expected
    assert estimated_cycles(HLO) == 15 * 10 + 5 * 100 + 1


def test_a_collective_in_a_loop_without_a_trip_count_is_refused():
    with pytest.raises(ValueError, match=r"trip count of the loop around \w+ is not in the program"):
        collectives(HLO.replace("%three = s32[] constant(3)", "%three = s32[] parameter(1)"), MESH)


def test_gradients_cross_data_once_after_the_scan():
    """Before any pass of the compiler, too: so while-loop-all-reduce-code-motion cannot move a sum over `data`. It
    miscompiled sums of scattered gradients (openxla/xla#49143)."""
    mesh = MeshConfig(fsdp=2, tensor=2)
    config = replace(tiny_config(depth=1), mesh=mesh)
    rows = 4 * 8 // mesh.tensor  # of four micro-batches
    config = replace(config, batch=replace(config.batch, tokens_per_step=16 * rows, rows_per_device=1))
    built = built_on(config, 8)
    assert built.batch_shape[0] == 4
    shape, parameters = sizes_of(built.mesh), sum(parameter_counts(config.model).values()) // 4  # on each device
    step = built.train_step.lower(built.abstract_state, built.abstract_batch())
    written, compiled = (collectives(text, shape) for text in (step.as_text("hlo"), step.compile().as_text()))
    for crossing in (written, compiled):
        assert not [c for c in crossing if c.in_loop and "data" in c.axes]
    assert {c.kind for c in written if "data" in c.axes} == {"all-gather", "reduce-scatter", "all-reduce"}
    assert [c for c in written if c.in_loop]  # the scan is recognised, and reduces over other axes
    payload = lambda kind: sum(c.times * c.bytes_each for c in compiled if c.kind == kind and "data" in c.axes)
    assert payload("all-gather") == 4 * parameters
    assert payload("reduce-scatter") == 4 * parameters
    assert payload("all-reduce") < 1024  # sums of losses, tokens and squares


def sums(output: str) -> tuple[int, int]:
    """Return the bytes reduced over data and the bytes of a chip's gradients, as printed by the program."""
    both = re.search(r"over data: ([\d,]+) bytes; gradients: ([\d,]+)", output)
    return int(both[1].replace(",", "")), int(both[2].replace(",", ""))


def run_main(monkeypatch, *more: str) -> int:
    network = "--config=configs/plain.py --rows=1 --model.depth=1 --model.width=64 --model.heads=2 --model.kv_heads=2"
    sizes = ("--model.vocab_size=4096", "--batch.sequence_length=32")
    monkeypatch.setattr(sys, "argv", ["collectives", *network.split(), *sizes, *more])
    return command.main()


@pytest.mark.medium
def test_the_program_passes_the_step_and_fails_one_that_reduces_every_micro_batch(monkeypatch, capsys):
    assert run_main(monkeypatch, "--micro_batches=3") == 0
    output = capsys.readouterr().out
    reduced, gradients = sums(output)
    assert gradients <= reduced < gradients + 1024
    assert re.search(r"reduce-scatter +f32 +data +once", output) and "temporaries" in output and "FAIL" not in output
    value_and_grad = jax.value_and_grad

    def reduced_each_time(function, **options):
        def graded(params):
            value, gradients = value_and_grad(function, **options)(params)
            return value, jax.lax.pcast(jax.lax.pmean(gradients, DATA_AXES), DATA_AXES, to="varying")

        return graded

    monkeypatch.setattr(jax, "value_and_grad", reduced_each_time)
    assert run_main(monkeypatch, "--micro_batches=3") == 1
    assert re.search(r"FAIL: all-reduce over data in the loop: 3 times a step", capsys.readouterr().out)


@pytest.mark.medium
def test_the_program_fails_a_step_with_a_collective_that_the_code_does_not_name(monkeypatch, capsys):
    """XLA's partitioner would sum the squares of a divided gradient."""

    def with_norm(*arguments):
        step_of = on_each_device(*arguments)

        def with_its_norm(state, batch):
            sums, update = step_of(state, batch)
            return sums, update._replace(grad_norm=optax.tree.norm(update.gradients))

        return with_its_norm

    monkeypatch.setattr("training.step.on_each_device", with_norm)
    assert run_main(monkeypatch, "--micro_batches=2") == 1
    assert re.search(r"FAIL: all-reduce over data is not in the code: 1 times", capsys.readouterr().out)


@pytest.fixture
def compiled_for(monkeypatch, capsys):
    """Return the program's output for a config on a TPU slice, on several, or on GPUs."""

    def say(topology: str, *arguments: str, config: str = "plain") -> str:
        pytest.importorskip("jax_cuda13_plugin" if "h100" in topology else "libtpu")
        command_line = [f"--config=configs/{config}.py", f"--topology={topology}", *arguments]
        monkeypatch.setattr(sys, "argv", ["collectives", *command_line])
        assert command.main() == 0
        return capsys.readouterr().out

    return say


# Compiling for a TPU takes longer for larger arrays, and as long again for each layer.
SMALL = ("--model.vocab_size=2048", "--batch.sequence_length=256")
SMALL += ("--model.depth=1", "--model.width=256", "--model.heads=2", "--model.kv_heads=2")


@pytest.mark.slow
def test_on_a_tpu_slice_gradients_are_scattered_over_fsdp_in_the_scan(compiled_for):
    """XLA:TPU would move the sum out of the loop and keep complete gradients in it (the pass of openxla/xla#49143).
    Check the memory of a recomputed block too."""
    output = compiled_for("v5e:2x4", *SMALL, "--mesh.fsdp=4", "--rows=64", "--model.remat=block")
    rows = [line.split()[:4] for line in output.splitlines()]
    assert ["reduce-scatter", "f32", "fsdp", "loop"] in rows and ["all-gather", "bf16", "fsdp", "loop"] in rows
    assert not [row for row in rows if row[:1] == ["reduce-scatter"] and row[2:] == ["fsdp", "once"]]
    reduced, gradients = sums(output)
    assert gradients == (2 * 2048 * 256 + 12 * 256**2)  # 4 bytes each, over fsdp=4
    assert gradients <= reduced < gradients + 1024
    # 0.06 GiB; 0.11 if every activation is stored
    assert float(re.search(r"temporaries ([\d.]+) GiB", output)[1]) < 0.07


@pytest.mark.slow
def test_on_a_tpu_slice_with_all_features_and_muon(compiled_for):
    """Nothing more crosses `data` in the scan. Matrices to be orthogonalised are sent once, and in parts."""
    sizes = ("--model.depth=2", "--model.vocab_size=2048", "--batch.sequence_length=256")
    reduced, gradients = sums(output := compiled_for("v5e:4x4", *sizes, config="nanochat"))
    width = 64 * 2  # one head, and one block with value embeddings
    gates = 12 + 24 + 1 + 1 + 2 * 2
    assert gradients == 4 * ((2 + 1) * 2048 * width + 2 * 12 * width**2 + gates)
    assert gradients <= reduced < gradients + 1024
    rows = [line.split() for line in output.splitlines() if " data " in line]
    assert {row[3] for row in rows} == {"once"}
    dealt = sum(int(row[5].replace(",", "")) for row in rows if row[0] == "all-to-all")
    # Each of the 16 chips receives one of the 8 matrices of attention, one of the 4 of the MLP and one gate [12, 1],
    # padded to 16, or zeros, each with the second moments of its longer side. It sends them back.
    assert dealt == 2 * 4 * ((width + 1) * width + (width + 1) * 4 * width + 2 * 16)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:4x4", "2x v5e:2x2", "h100:8", "2x h100:8"])
def test_muon_s_collectives_are_the_code_s_and_as_many_in_a_deeper_network(compiled_for, topology):
    """Deal and collect the matrices and second moments of three shapes. Otherwise the program ends with 1."""
    sizes = ("--model.vocab_size=2048", "--batch.sequence_length=256", "--rows=1", "--micro_batches=2")
    for depth in (2, 4):
        output = compiled_for(topology, f"--model.depth={depth}", *sizes, config="nanochat")
        dealt = [line.split() for line in output.splitlines() if line.startswith("all-to-all")]
        assert sum(int(row[4]) for row in dealt) == 3 * 4
