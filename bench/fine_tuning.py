"""Measure the effect of averaging micro-batch means on fine-tuning: the figures of docs/fine-tuning.md.

    python -m bench.fine_tuning --config=configs/chat.py --init_from=runs/small --batch.tokens_per_step=8192
    python -m bench.fine_tuning --config=configs/chat.py --init_from=runs/small --part=runs --steps=60
    NANOCHAT_DIR=DIR python -m bench.fine_tuning --config=configs/chat.py --init_from=runs/small --part=nanochat

K micro-batches share the rows of a step. Conversations are packed into rows, or (--alone) have a row each.

means       the relative error of a step's gradient by K, of optax.MultiSteps over the micro-batches' means
sum         the same of this project's step
runs        the held-out loss after complete runs by both rules
nanochat    both for nanochat's own network, loss and optimizer, as its scripts/chat_sft.py calls them, from the same
            parameters and on the same rows
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from bench.nanochat_names import their_network
from configs.command_line import parse
from configs.files import cache_dir
from configs.schema import Config
from data.dataset import open_text
from hosts.runtime import run_command, start_jax
from interchange.init_from import read_params
from model.loss import loss_sums
from training.build import Build, build
from training.mesh import parameter_places
from training.state import split_model
from training.step import gradient_sums

BATCHES = 4  # whose gradients' errors are averaged
EVALUATED = 32  # rows at a time
Rows = dict[str, np.ndarray]
Gradient = Callable[[Any], Float[np.ndarray, "parameters"]]
"""From a batch [K, B, T] to the gradient that an update gets."""


@dataclass(frozen=True)
class Arguments:
    """The measurement."""

    part: Literal["means", "sum", "runs", "nanochat"] = "means"
    """The measurement."""
    alone: bool = False
    """Give each conversation a row of its own."""
    seeds: int = 3
    """Runs with each rule. They differ in the order of the rows."""


def load_rows(config: Config, alone: bool) -> tuple[Rows, Rows]:
    """Return the training rows and the held-out rows, each [rows, T]."""
    text = open_text(config.data, config.model.vocab_size, config.batch.sequence_length, 1, cache_dir())

    def rows(part: Any) -> Rows:
        read = [part[i] for i in range(len(part))]
        packed = {name: np.stack([row[name] for row in read]) for name in read[0]}
        packed = each_alone(packed, text.tokenizer.bos) if alone else packed
        return packed | {"segment_ids": np.cumsum(packed["inputs"] == text.tokenizer.bos, axis=1, dtype=np.int32)}

    return rows(text.train[0]), rows(text.val[0])


def each_alone(rows: Rows, bos: int) -> Rows:
    """Return the conversations of packed rows [rows, T], each in a row of its own. Leave out those without a valid
    token."""
    starts = np.flatnonzero(rows["inputs"] == bos)  # of conversations, and of each position of padding
    index = starts[:, None] + np.arange(rows["inputs"].shape[1])
    inside = index < np.append(starts[1:], rows["inputs"].size)[:, None]
    filler = {"inputs": bos, "targets": bos, "weights": 0}
    taken = {name: np.where(inside, rows[name].ravel().take(index, mode="clip"), filler[name]) for name in filler}
    return {name: array[taken["weights"].any(axis=1)].astype(rows[name].dtype) for name, array in taken.items()}


def count_of(config: Config) -> int:
    """Return the rows of a step."""
    return config.batch.tokens_per_step // config.batch.sequence_length


def split(rows: Rows, micro_batches: int) -> Any:
    """Return a step's rows [rows, T] as a batch [K, B, T]."""
    return {name: array.reshape(micro_batches, -1, array.shape[-1]) for name, array in rows.items()}


def means(batch: Any) -> Any:
    """Return the batch with weights that make the step compute the mean of its micro-batches' means: N / (K n_k) for
    the tokens of micro-batch k. One without a valid token, whose mean is NaN, counts as 0."""
    weights = batch["weights"]
    counts = weights.sum(axis=(1, 2), keepdims=True)
    return {**batch, "weights": weights * counts.sum() / (len(counts) * np.maximum(counts, 1))}


def step_rows(rows: Rows, count: int, step: int, seed: int) -> Rows:
    """Return the `count` rows of a step: the next ones in an order drawn from the seed, which repeats."""
    shuffled = np.random.default_rng(seed).permutation(len(rows["inputs"]))
    chosen = shuffled.take(range(step * count, step * count + count), mode="wrap")
    return {name: array[chosen] for name, array in rows.items()}


def gradient_errors(gradient: Gradient, rows: Rows, count: int) -> dict[int, float]:
    """Return, by K, the mean relative distance of the gradient of steps of `count` rows from the one with K = 1."""
    errors: dict[int, list[float]] = {}
    for step in range(BATCHES):
        batch = step_rows(rows, count, step, seed=0)
        exact = gradient(split(batch, 1))
        for micro_batches in [k for k in range(2, count + 1) if count % k == 0]:
            difference = gradient(split(batch, micro_batches)) - exact
            errors.setdefault(micro_batches, []).append(float(np.linalg.norm(difference) / np.linalg.norm(exact)))
    return {micro_batches: float(np.mean(values)) for micro_batches, values in errors.items()}


@partial(jax.jit, static_argnums=0)
def handed_on(micro_batches: int, sums: dict, tokens: Int[Array, "rows"]) -> dict:
    """Return the result of optax.MultiSteps over micro-batch means, from each row's gradient sum and valid tokens."""
    of_micro_batch = lambda array: array.reshape(micro_batches, -1, *array.shape[1:]).sum(1)
    counts = of_micro_batch(tokens)
    means = jax.tree.map(lambda g: of_micro_batch(g) / counts.reshape(-1, *[1] * (g.ndim - 1)), sums)
    transform = optax.MultiSteps(optax.sgd(-1.0), micro_batches)
    state = transform.init(jax.tree.map(lambda g: g[0], sums))

    def hand_on(state: Any, mean: dict) -> tuple[Any, Any]:
        updates, state = transform.update(mean, state)
        return state, updates

    _, updates = jax.lax.scan(hand_on, state, means)
    return jax.tree.map(lambda u: u[-1], updates)


class Ours:
    """This project's network and step, on one device."""

    def __init__(self, built: Build, params: dict):
        self.built, self.params, self.count = built, params, count_of(built.config)
        self.kept: tuple[bytes, Any] = b"", None
        model, dtype = built.config.model, built.dtype
        graphdef, _ = split_model(model, dtype)
        options = {"graphdef": graphdef, "places": parameter_places(model, built.mesh), "dtype": dtype}
        self.sums = jax.jit(partial(gradient_sums, **options, measured=False))

        def of_row(params: dict, row: dict) -> tuple[Array, Array]:
            objective, (_, tokens) = loss_sums(nnx.merge(graphdef, params), **{n: a[None] for n, a in row.items()})
            return objective, tokens

        gradient = jax.grad(of_row, has_aux=True)
        self.row_gradients = jax.jit(lambda params, rows: jax.lax.map(partial(gradient, params), rows))

    def summed(self, batch: Any) -> Float[np.ndarray, "parameters"]:
        """Return the gradient as the step computes it."""
        sums = self.sums(self.params, batch)
        return _flat(sums.gradients) / int(sums.tokens)

    def multi_steps(self, batch: Any) -> Float[np.ndarray, "parameters"]:
        """Return the output of optax.MultiSteps whose inputs are the gradients of micro-batch means."""
        rows = {name: array.reshape(-1, array.shape[-1]) for name, array in batch.items()}
        return _flat(handed_on(len(batch["inputs"]), *self.of_rows(rows)))

    def of_rows(self, rows: Rows) -> tuple[dict, Array]:
        """Return each row's gradient of its loss sum, and its valid tokens. The latest rows are cached."""
        key = rows["inputs"].tobytes()
        if self.kept[0] != key:
            self.kept = key, self.row_gradients(self.params, rows)
        return self.kept[1]

    def trained(self, rows: Rows, held_out: Rows, seed: int, micro_batches: int, rule: Callable) -> float:
        """Return the held-out loss, in nats a valid token, after a run with one rule for a step's batch."""
        state = self.built.create_state()._replace(params=jax.tree.map(jax.numpy.copy, self.params))
        for step in range(self.built.config.steps):
            state, _ = self.built.train_step(state, rule(split(step_rows(rows, self.count, step, seed), micro_batches)))
        return self.loss(state.params, held_out)

    def loss(self, params: dict, held_out: Rows) -> float:
        """Return the nats a valid token over all held-out rows."""
        count = -(-len(held_out["inputs"]) // EVALUATED) * EVALUATED
        padded = {name: np.resize(array, (count, array.shape[1])) for name, array in held_out.items()}
        padded["weights"][len(held_out["inputs"]) :] = 0
        losses, tokens = self.built.eval_step(params, split(padded, count // EVALUATED))
        return float(losses.sum()) / int(tokens.sum())


def _flat(tree: Any) -> Float[np.ndarray, "parameters"]:
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


class Theirs:
    """nanochat's network with the run's parameters, its loss and its optimizer."""

    def __init__(self, config: Config, params: dict):
        import torch

        self.torch, self.config, self.count = torch, config, count_of(config)
        self.network = partial(their_network, config, params)

    def targets(self, rows: Any) -> np.ndarray:
        """Return the targets, and -1 for those that do not count."""
        return np.where(rows["weights"] > 0, rows["targets"], -1).astype(np.int64)

    def backward(self, network: Any, batch: Any) -> None:
        """Leave a step's gradient in the network, as nanochat's training loop does."""
        for x, y in zip(self.torch.tensor(batch["inputs"]), self.torch.tensor(self.targets(batch))):
            loss = network(x, y) / len(batch["inputs"])
            loss.backward()

    def gradient(self, batch: Any) -> Float[np.ndarray, "parameters"]:
        """Return a step's gradient."""
        network = self.network()
        self.backward(network, batch)
        return np.concatenate([p.grad.double().numpy().ravel() for p in network.parameters() if p.grad is not None])

    def trained(self, rows: Rows, held_out: Rows, seed: int, micro_batches: int) -> float:
        """Return the held-out loss after a run with nanochat's rates, schedule and momentum of chat_sft."""
        network = self.network()
        optimizer, steps = network.setup_optimizer(unembedding_lr=0.008, embedding_lr=0.3), self.config.steps
        for group in optimizer.param_groups:
            group["initial_lr"] = 0.8 * group["lr"]
        for step in range(steps):
            self.backward(network, split(step_rows(rows, self.count, step, seed), micro_batches))
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * min(1.0, 2 * (1 - step / steps))
                if group["kind"] == "muon":
                    group["momentum"] = 0.85 + min(step / 300, 1) * 0.1
            optimizer.step()
            network.zero_grad(set_to_none=True)
        return self.loss(network, held_out)

    def loss(self, network: Any, held_out: Rows) -> float:
        """Return the nats a valid token over all held-out rows."""
        inputs = self.torch.tensor(held_out["inputs"]).split(EVALUATED)
        targets = self.torch.tensor(self.targets(held_out)).split(EVALUATED)
        with self.torch.no_grad():
            losses = sum(float(network(x, y, loss_reduction="sum")) for x, y in zip(inputs, targets))
        return losses / float(held_out["weights"].sum())


def main() -> int:
    config, arguments = parse(__doc__, Arguments)
    start_jax()
    count = count_of(config)
    config = replace(config, batch=replace(config.batch, rows_per_device=count))
    train, held_out = load_rows(config, arguments.alone)
    built = build(config, jax.devices()[:1])
    ours = Ours(built, read_params(config, built.abstract_state.params))
    valid = train["weights"].sum(axis=1)
    facts = {
        "rows": len(valid),
        "valid tokens of a row, percentiles 1, 50, 99": np.percentile(valid, [1, 50, 99]).tolist(),
        "their standard deviation over their mean": float(valid.std() / valid.mean()),
        "rows without any": int((valid == 0).sum()),
    }
    print(json.dumps(facts), flush=True)
    seeds = range(arguments.seeds)
    if arguments.part in ("sum", "means"):
        gradient = ours.summed if arguments.part == "sum" else ours.multi_steps
        print(json.dumps({arguments.part: gradient_errors(gradient, train, count)}), flush=True)
    elif arguments.part == "runs":
        print(json.dumps({"loss before": ours.loss(ours.params, held_out)}), flush=True)
        at_once = lambda batch: {name: array.reshape(1, count, -1) for name, array in means(batch).items()}
        rules = ("sum", dict, 1), ("means", at_once, count), ("means", at_once, count // 4), ("sum", dict, count)
        for name, rule, micro_batches in rules:
            losses = [ours.trained(train, held_out, seed, micro_batches, rule) for seed in seeds]
            print(json.dumps({"rule": name, "K": micro_batches, "losses": losses}), flush=True)
    else:
        theirs = Theirs(config, ours.params)
        print(json.dumps({"errors": gradient_errors(theirs.gradient, train, count)}), flush=True)
        for micro_batches in (count, 1):
            losses = [theirs.trained(train, held_out, seed, micro_batches) for seed in seeds]
            print(json.dumps({"K": micro_batches, "losses": losses}), flush=True)
    return 0


if __name__ == "__main__":
    run_command(main)
