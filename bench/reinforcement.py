"""Measure what the divisor changes in reinforcement: the figures of docs/reinforcement.md.

    python -m bench.reinforcement --config=configs/reinforce.py --init_from=runs/sums
    python -m bench.reinforcement --config=configs/reinforce.py --init_from=runs/sums --rule=per_pass --name=per_pass

The first command compares gradients, by the split into micro-batches. The second is a run of reinforce.py by a rule.

Three rules divide the same sums. `per_answer` is GRPO's (arXiv:2402.03300): the mean over an answer's tokens, then over
a micro-batch's answers, then over micro-batches. `per_pass` is nanochat's chat_rl: each micro-batch is divided by its
own drawn tokens, then by the number of micro-batches. `ours` divides once by the step's drawn tokens. All three are
train_step with other weights. A line has the relative error of the gradient against the same rule with K = 1, and of
K = 1 against `ours`: the mean over the steps. In a run, a pass has 8 answers, as in nanochat.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Float

import reinforce
import train
from configs.command_line import parse
from configs.schema import Config, with_options
from evaluation.engine import Answer
from hosts.runtime import run_command, start_jax
from interchange.init_from import initial_state
from model.sampling import Sampling
from reinforcement.rollouts import Rollout, Rollouts, advantages, prompt_of
from reinforcement.start import open_task
from training.build import Build, build
from training.step import make_train_step

SPLITS = (1, 2, 4, 8, 16)
RULES = ("per_answer", "per_pass", "ours")
PASS = 8  # answers of a pass in a run: nanochat's device_batch_size
STEPS = 2  # whose gradients are measured, of the same parameters


def rule_weights(
    rule: str, drawn: Float[np.ndarray, "answers"], advantage: Float[np.ndarray, "answers"], micro_batches: int
) -> Float[np.ndarray, "answers"]:
    """Return each answer's weight with which train_step divides as `rule` does. `drawn`: the tokens of each answer."""
    divisor = drawn[advantage != 0].sum()  # train_step's own
    if rule == "per_answer":  # every micro-batch has equally many answers
        return (advantage * divisor / (drawn * len(drawn))).astype(np.float32)
    if rule == "per_pass":
        of_pass = np.repeat(drawn.reshape(micro_batches, -1).sum(axis=1), len(drawn) // micro_batches)
        return (advantage * divisor / (of_pass * micro_batches)).astype(np.float32)
    return advantage


def drawn_of(some: Sequence[Rollout]) -> Float[np.ndarray, "answers"]:
    """Return the number of tokens that the network drew for each answer."""
    return np.array([sum(one.answer.drawn) + len(one.answer.end) for one in some], np.float64)


def gradients_by(built: Build, rollouts: Rollouts, some: list[Rollout]) -> dict[str, Any]:
    """Return the gradient of these answers by each rule."""
    config, drawn = built.config, drawn_of(some)
    advantage, _ = advantages(some, config.reinforce.samples)
    of_step = (config.model, built.dtype, built.mesh, built.abstract_state, built.optimizer, built.rates)
    step = make_train_step(*of_step, 1.0, 0, lambda state, sums, update: {"gradient": update.gradients})
    rollouts.built, found = built, {}
    for rule in RULES:
        batch = rollouts.batch(some, rule_weights(rule, drawn, advantage, built.batch_shape[0]))
        _, metrics = step(initial_state(built), batch)
        leaves = jax.tree.leaves(jax.device_get(metrics["diagnostics"]["gradient"]))
        found[rule] = np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in leaves])
    return found


def uneven(rollouts: Rollouts, step: int) -> list[Rollout]:
    """Return answers of random tokens, whose lengths differ a hundredfold and whose rewards are drawn."""
    options, draw = rollouts.config.reinforce, np.random.default_rng(step)
    problem = rollouts.task.problem(step, False)
    prompt, count = prompt_of(rollouts.tokenizer, problem), options.prompts * options.samples
    made = []
    for length in draw.permutation(np.geomspace(2, 200, count).round().astype(int)).tolist():
        tokens = draw.integers(300, rollouts.tokenizer.vocab_size, length).tolist()
        answer = Answer(Sampling(), length, 0, tokens, [True] * length, [], "length")
        made.append(Rollout(problem, prompt, answer, "", float(draw.integers(2))))
    return made


def errors(config: Config, length: int, prompts: int, is_uneven: bool) -> dict[str, dict[str, float]]:
    """Return each rule's errors by K, for rows that have one answer each."""
    rows = prompts * config.reinforce.samples
    sizes: dict[str, object] = {"reinforce.prompts": prompts, "reinforce.tokens": length}
    sizes |= {"batch.sequence_length": length, "batch.tokens_per_step": rows * length, "mesh.data": 1}
    config = with_options(config, sizes | {"model.dtype": "float32", "batch.rows_per_device": rows})
    built, text, task = open_task(config)
    params = initial_state(built).params
    rollouts = Rollouts(built, task, text.tokenizer, params)
    found: dict[str, list[dict[str, float]]] = {rule: [] for rule in RULES}
    builds = [build(replace(config, batch=replace(config.batch, rows_per_device=rows // k))) for k in SPLITS]
    for step in range(STEPS):
        some = uneven(rollouts, step) if is_uneven else rollouts.of_step(params, step, lambda: False)
        assert some
        by_split = [gradients_by(one, rollouts, some) for one in builds]
        for rule in RULES:
            gap = lambda one, other: float(np.linalg.norm(one - other) / np.linalg.norm(other))
            line = {f"K={k}": gap(by[rule], by_split[0][rule]) for k, by in zip(SPLITS, by_split)}
            found[rule].append(line | {"K=1 against ours": gap(by_split[0][rule], by_split[0]["ours"])})
    return {rule: {k: float(np.mean([line[k] for line in lines])) for k in lines[0]} for rule, lines in found.items()}


@dataclass(frozen=True)
class Arguments(train.Arguments):
    """Options of this command, not of the run."""

    rule: Literal["", "per_answer", "per_pass", "ours"] = ""
    """Train a whole run by this rule. Default: compare gradients."""


def train_by(rule: str) -> int:
    """Run reinforce.py with weights by a rule."""

    def weights(some: Sequence[Rollout], samples: int) -> tuple[Float[np.ndarray, "answers"], float]:
        advantage, left_out = advantages(some, samples)
        return rule_weights(rule, drawn_of(some), advantage, len(some) // PASS), left_out

    reinforce.advantages = weights
    return train.main(__doc__, Arguments, reinforce.reinforce)


def main() -> int:
    config, arguments = parse(__doc__, Arguments)
    if arguments.rule:
        return train_by(arguments.rule)
    start_jax()
    print(json.dumps({"sums": errors(config, 48, 2, False)}), flush=True)
    print(json.dumps({"hundredfold": errors(config, 256, 1, True)}), flush=True)
    return 0


if __name__ == "__main__":
    run_command(main)
