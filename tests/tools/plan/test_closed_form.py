"""Compare the closed form with the shapes in training, and with compiled programs."""

import contextlib
import json
import shlex
from dataclasses import asdict, replace
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.throughput import Sizes, sized
from configs import plain
from configs.command_line import parse
from configs.schema import Config, EvalConfig, MeshConfig, UserError, with_options
from configs.validation import resolved
from data.loader import held_out_batches
from data.packing import StreamRows
from data.shards import TokenStream
from hosts.machines import GIB, HEADROOM, machines
from model.gpt import GPT
from tests.helpers import ALL_FEATURES, tiny_config
from tests.tools.programs.test_hlo_collectives import MESHES, lowered
from tools.plan import corrections, output
from tools.plan.corrections import factors, measured
from tools.plan.search import ERROR, WORTH, Given, nearest_change, row_of, search
from tools.plan.step_time import START, StepTime, communication, kernel_of, step_time
from tools.plan.whole_run import PROCESSORS, whole_run
from tools.programs.compiled import collectives
from tools.programs.topologies import known_topology
from tools.report.runs import read_run
from training.build import build
from training.candidate import Candidate
from training.memory import device_bytes, evaluation_memory, memory
from training.state import compute_dtype


def candidate_of(words: str) -> Candidate:
    """Return the candidate that a topology and a command's options describe."""
    name, *options = shlex.split(words)
    topology = known_topology(name)
    with contextlib.redirect_stdout(None):  # options that follow from the depth
        config, sizes = parse(None, Sizes, options)
        return Candidate(sized(config, sizes, topology.devices), topology)


D12 = "--model.width=768 --model.heads=6 --model.kv_heads=6"


def candidate(topology: str, config: Config | None = None, **mesh: int) -> Candidate:
    """Return the candidate of the config, or of d12's, on a topology."""
    config = config or Config(name="d12", steps=2520)
    return Candidate(resolved(replace(config, mesh=MeshConfig(**mesh))), known_topology(topology))


def small(mesh: MeshConfig) -> Candidate:
    """Return the candidate whose step `lowered` compiles."""
    config = replace(tiny_config(depth=1), mesh=mesh)
    batch = replace(config.batch, tokens_per_step=16 * 4 * 8 // mesh.tensor, rows_per_device=1)
    return Candidate(resolved(replace(config, batch=batch)), known_topology("h200:8"))


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [({}, "muon"), ({"fsdp": 2, "tensor": 2}, "muon"), ({"fsdp": 4}, "adamw")],
)
def test_parameters_and_moments_equal_the_state_s(mesh, kind):
    config = tiny_config(**ALL_FEATURES, width=64)
    config = with_options(config, {"optimizer.matrices.kind": kind})
    of = candidate("h200:8", config, **mesh)
    built = build(of.config, jax.devices()[:8])
    size = lambda tree: sum(4 * prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(tree))
    parts = memory(of)
    assert parts["parameters"] == size(built.abstract_state.params)
    # The optimizer stores step counts in a few 32-bit numbers.
    assert 0 <= size(built.abstract_state.opt_state) - parts["moments"] <= 64
    assert parts["batch"] == size(built.abstract_batch())


@MESHES
def test_the_program_takes_the_arguments_and_sends_as_planned(mesh):
    step, shape, _ = lowered(mesh)
    of = small(mesh)
    assert of.sizes == shape
    parts = memory(of)
    program = step.compile()
    arguments = program.memory_analysis().argument_size_in_bytes
    assert arguments == pytest.approx(parts["parameters"] + parts["moments"] + parts["batch"], rel=0.01)
    crossing = collectives(step.as_text("hlo"), shape)
    sent = lambda kind, axis: sum(c.times * c.bytes_each for c in crossing if c.kind == kind and c.axes == (axis,))
    planned = {(t.kind, t.axis): t for t in communication(of)}
    assert {axis for _, axis in planned} == {axis for axis, size in shape.items() if size > 1}
    for (kind, axis), traffic in planned.items():
        if (kind, axis) == ("all-gather", "fsdp"):  # written forward and backward; once if XLA keeps it
            assert traffic.bytes < sent(kind, axis) <= 2 * traffic.bytes
        else:
            assert sent(kind, axis) == pytest.approx(traffic.bytes, rel=0.01), (kind, axis)
        assert {c.in_loop for c in crossing if c.kind == kind and c.axes == (axis,) and c.bytes_each > 64} == {
            traffic.in_scan
        }


def test_traffic_between_slices_and_nodes():
    for topology, fsdp, between in [
        *(("v5e:16x16", 1, set()), ("2x v5e:4x4", 4, {"data"})),
        *(("4x h200:8", 8, {"data"}), ("4x h200:8", 16, {"data", "fsdp"})),
    ]:
        traffic = communication(candidate(topology, fsdp=fsdp))
        assert {t.axis for t in traffic if t.link == "between"} == between
        assert all(t.fast <= t.slow for t in traffic)


@pytest.mark.parametrize(
    ("topology", "fsdp", "doubled"),
    [
        ("v5p:4x4x4", 64, ["all-gather", "reduce-scatter"]),
        ("v5e:4x4", 16, ["reduce-scatter"]),
        *(("v5e:4x4", 8, []), ("v5e:2x2", 4, []), ("2x v5e:4x4", 16, []), ("h200:8", 8, [])),
    ],
)
def test_fsdp_over_all_of_a_tpu_slice_sends_twice_as_much(topology, fsdp, doubled):
    """Expect the all-reduces of compiled programs (JAX 0.10.2) there."""
    of = candidate(topology, fsdp=fsdp)
    for t in (t for t in communication(of) if t.axis == "fsdp" and t.in_scan):
        rounds = (t.fast - t.times * START) * of.machine.links / (t.bytes * (fsdp - 1) / fsdp)
        assert rounds == pytest.approx(2 if t.kind in doubled else 1)


@pytest.mark.parametrize(
    ("words", "gib"),
    [
        # `fsdp` over all of a large slice: XLA sums zeros there.
        (
            "v5p:4x4x4 --config=configs/plain.py --model.depth=8 --rows=2 --model.width=2048 --model.heads=16 "
            "--model.kv_heads=16 --mesh.fsdp=64 --model.remat=block",
            1.900,
        ),
        # Products of weight gradients wait if they read less than the logits, but not at depth 12 and width 768.
        (
            f"h200:1 --config=configs/plain.py --rows=32 --model.depth=4 {D12}",
            11.797,
        ),
        ("h200:1 --config=configs/plain.py --model.depth=12 --rows=32", 17.776),
        # With `fsdp` none waits. With recomputation the peak is at the end or the beginning.
        ("h200:8 --config=configs/plain.py --model.depth=12 --rows=32 --mesh.fsdp=8", 16.132),
        (
            f"h200:8 --config=configs/plain.py --model.depth=10 {D12} --rows=16 --mesh.fsdp=4 --mesh.tensor=2",
            4.359,
        ),
        ("h200:8 --config=configs/nanochat.py --model.depth=10 --rows=16 --mesh.fsdp=4 --model.remat=block", 3.857),
    ],
)
def test_memory_equals_compiled_programs(words, gib):
    """Compare a step of two micro-batches with a program of each rule, compiled with JAX 0.10.2."""
    of = candidate_of(f"{words} --micro_batches=2")
    assert sum(memory(of).values()) == pytest.approx(gib * GIB, rel=0.05 if "fsdp" in words else 0.03)


def test_passes_and_products_take_the_time_of_the_units_that_bound_them():
    """v5p's memory is 3.4 times as fast as v5e's, and its vector units are 2.3 times as fast."""

    def time(topology: str, dtype: str) -> StepTime:
        return step_time(candidate(topology, with_options(plain.of_depth(12), {"model.dtype": dtype})))

    v5e = time("v5e:2x2", "bfloat16")
    assert 2.2 < v5e.passes / time("v5p:2x2x1", "bfloat16").passes < 2.6
    assert time("v5e:2x2", "float32").products == pytest.approx(6 * v5e.products)
    assert time("h100:1", "float32").products == pytest.approx(989 / 67 * time("h100:1", "bfloat16").products)
    assert time("t4:1", "auto").products == time("t4:1", "float32").products


@pytest.mark.parametrize("kind", ["t4", "a100", "h100"])
def test_a_gpu_s_compute_type_and_attention(kind, monkeypatch):
    """GPUs before Ampere compute in float32, which cuDNN's attention does not take; a run chooses the same type."""
    of = candidate(f"{kind}:1", plain.of_depth(12))
    assert (of.dtype, kernel_of(of)) == (("float32", "blocks") if kind == "t4" else ("bfloat16", "cudnn"))
    monkeypatch.setattr("model.parallel.described_capability", of.machine.capability)
    assert compute_dtype(of.config.model, "gpu").name == of.dtype
    assert kernel_of(of.having({"data.mask_documents": True})) == "blocks"
    heads = of.having({"model.heads": 3, "model.kv_heads": 3, "model.head_dim": 256})
    assert kernel_of(heads) == ("cudnn" if kind == "h100" else "blocks")


def test_held_out_rows_and_a_cache_take_their_bytes_on_a_device():
    config = tiny_config(rows_per_device=1)
    rows = StreamRows(TokenStream([np.ones(16 * 99 + 1, np.int64)]), 16)
    of = candidate("h200:8", replace(config, eval=EvalConfig(tokens=16 * 17, sample_tokens=8)))
    built = build(of.config, jax.devices()[:8])
    size, shape = np.ones(config.model.vocab_size, np.int32), (built.batch_shape, built.batch_sharding)
    batches, _ = held_out_batches([rows], [1.0], of.config.eval.tokens, size, *shape)
    expected = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(batches))
    parts = evaluation_memory(of, memory(of))
    assert len(batches) == 2 and parts["held-out rows"] == expected
    model = GPT(of.config.model, jnp.dtype(of.config.model.dtype), rngs=None)
    cache = sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(jax.eval_shape(lambda: model.empty_cache(3, 9).layers))
    )
    longer = of.having({"eval.sample_tokens": 9})
    assert evaluation_memory(longer, memory(longer))["sampling"] - parts["sampling"] == cache / 9


def test_a_device_must_hold_the_most_of_step_evaluation_and_sampling():
    of = candidate("v5e:4x4")
    row, step = row_of(of, Given()), sum(memory(of).values())
    assert row.bytes == step + row.evaluation["held-out rows"] == device_bytes(of)
    many = of.having({"eval.prompts": ("",) * 9999})
    assert device_bytes(many) == evaluation_memory(many, memory(many))["sampling"] > step


def test_less_memory_costs_more_time():
    of = candidate("v5e:4x4")
    costs = {}
    for remat in ("none", "products", "block"):
        few, many = (of.changed(1, 1, 16, remat, chunks) for chunks in (1, 8))
        costs[remat] = sum(memory(few).values()), step_time(few).expected
        assert sum(memory(many).values()) < costs[remat][0] and step_time(many).expected > costs[remat][1]
    sizes, times = zip(*costs.values())
    assert list(sizes) == sorted(sizes, reverse=True) and list(times) == sorted(times)


def test_a_search_puts_the_fastest_that_fits_first_and_prefers_a_cheap_margin_below_the_limit(monkeypatch):
    of = candidate("v5e:4x4")
    rows = search(of, Given())
    fitting = [row for row in rows if row.fits]
    assert rows[: len(fitting)] == fitting
    assert [row.time.expected for row in fitting[1:]] == sorted(row.time.expected for row in fitting[1:])
    assert len({tuple(row.candidate.options().items()) for row in rows}) == len(rows) > 100
    fastest = min(rows, key=lambda row: row.time.expected)
    memory = int(fastest.bytes * (1 + ERROR / 2) / HEADROOM)
    monkeypatch.setitem(machines(), "v5e", replace(machines()["v5e"], memory=memory))
    first, *rest = search(of, Given())
    near = [row for row in rest if row.fits and row.time.expected < first.time.expected]
    assert first.safe and near and not any(row.safe for row in near)
    assert first.time.expected <= WORTH * fastest.time.expected


def test_the_nearest_change_is_the_fewest_options_and_fits(monkeypatch):
    tight = replace(machines()["v5e"], memory=3 * GIB)
    monkeypatch.setitem(machines(), "v5e", tight)
    row = row_of(candidate("v5e:4x4"), Given())
    change = nearest_change(row)
    assert not row.fits and change
    assert change[0].count("--") == 1 and change[1].bytes <= HEADROOM * tight.for_programs


def test_preemptions_take_half_an_interval_and_a_restart_each():
    of = candidate("v5e:4x4")
    time = step_time(of)
    none, some = whole_run(of, time, 2.0, 0.0), whole_run(of, time, 2.0, 4.0)
    lost = 4 * (250 * time.expected / 2 + 600) / 86_400
    assert some.days == pytest.approx(none.days / (1 - lost)) and some.goodput < none.goodput < 1
    assert some.cost == pytest.approx(some.days * 24 * 16 * 2)
    assert none.days * 86_400 > of.config.steps * time.expected + none.compile_seconds / PROCESSORS
    with pytest.raises(UserError, match="the run never ends"):
        whole_run(of, time, None, 1000.0)


def test_a_checkpoint_has_the_bytes_of_the_state():
    changes = {"optimizer.matrices.kind": "muon"}
    of = candidate("v5e:4x4", with_options(tiny_config(rows=16), changes))
    state = build(of.config, jax.devices()[:1]).abstract_state
    saved = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert 0 <= saved - whole_run(of, step_time(of), None, 0.0).checkpoint_bytes <= 64  # counts of steps


def test_compiled_sizes_count_and_the_next_is_compiled_if_one_does_not_fit(monkeypatch):
    rows = search(candidate("v5e:4x4"), Given())
    asked = []

    def pretend(row):
        asked.append(row)
        return int((100 if len(asked) == 1 else 8) * GIB)

    monkeypatch.setattr(corrections, "_compiled_bytes", pretend)
    best = corrections.corrected(rows, 1)
    assert asked == rows[:2]
    assert best[0].candidate is rows[1].candidate and best[0].compiled == 8 * GIB and best[0].fits
    assert not best[-1].fits and best[-1].compiled
    monkeypatch.setattr(corrections, "_compiled_bytes", lambda row: 100 * GIB)
    best = corrections.corrected(rows, 1)
    assert best[0].candidate is rows[2].candidate and best[0].fits  # according to the closed form


def finished_run(folder, of, seconds, peak):
    """Write the parts of a run that tools.plan reads, with `seconds` per step and `peak` bytes."""
    per_second = of.config.batch.tokens_per_step / seconds
    line = {"time": 0.0, "loss": 3.0, "peak_memory_bytes": peak}
    # The first logged step includes the start. Other work slowed the last.
    rates = [per_second / 10, per_second, per_second, per_second / 2]
    lines = [line | {"step": 10 * i, "tokens_per_second": rate} for i, rate in enumerate(rates, 1)]
    folder.mkdir()
    devices = {"kind": "TPU v5 lite", "count": 16, "processes": 4, "slices": 1}
    record = {"config": asdict(of.config), "dataset": "", "versions": {}, "devices": devices, "changes": []}
    (folder / "config.json").write_text(json.dumps(record))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_run(folder)


def test_measurements_of_a_run_replace_assumptions(tmp_path):
    of = candidate("v5e:4x4")
    seconds, peak = 2 * step_time(of).expected, int(1.25 * device_bytes(of))
    result = measured(finished_run(tmp_path / "run", of, seconds, peak))
    assert result.machine == "v5e" and "-50.0%" in result.words and "-20.0%" in result.words
    assert factors([result], "v6e") == (1.0, 1.0)
    row = row_of(of, Given(None, 0.0, *factors([result, result._replace(machine="v6e", bytes=9.0)], "v5e")))
    assert row.time.expected == pytest.approx(seconds) and row.bytes == pytest.approx(peak)
    assert row.run.tokens_per_second == pytest.approx(of.config.batch.tokens_per_step / seconds)
    with pytest.raises(UserError, match="has not logged two steps"):
        (tmp_path / "run" / "metrics.jsonl").write_text("")
        measured(read_run(tmp_path / "run"))


@pytest.mark.slow  # parses about 160 command lines; JAX's version does not matter
def test_the_printed_errors_are_the_grid_s():
    """Read compiled programs' figures from bench/plan_grid.jsonl, and whether the rules were chosen with them."""
    errors = {True: [], False: []}
    for program in map(json.loads, Path("bench/plan_grid.jsonl").read_text().splitlines()):
        size = sum(program[part] for part in ("arguments", "outputs", "temporaries"))
        errors[program["in_view"]].append(100 * sum(memory(candidate_of(program["point"])).values()) / size - 100)
    in_view, unseen = (
        f"({np.median(np.abs(part)):.1f}% off at the median, {min(part):+.1f}% to {max(part):+.1f}%)"
        for part in errors.values()
    )
    assert (
        f"the closed form's memory was compared with {sum(map(len, errors.values()))} compiled programs: "
        f"{len(errors[True])} known when its rules were chosen {in_view}, {len(errors[False])} held out {unseen}; "
        "its seconds were compared with no run (docs/planning.md)"
    ) == output.ACCURACY
