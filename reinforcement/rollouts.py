"""Rollouts: the answers that a network draws to a step's questions, their rewards, and the step's batch of them.

A step's questions and the seeds of its draws are functions of the run's seed and the step. So its answers are a
function of the parameters, too: nothing is saved.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import comb
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Bool, Float

from evaluation.statistics import mean_share_interval
from generation.engine import Answer, Engine
from model.sampling import Sampling
from options.schema import Config, with_options
from reinforcement.questions import Questions, answers_of_step, prompt_of
from reinforcement.tasks import Problem
from run.due import is_due
from run.network import Network
from run.source import ResumePoint, StepBatch
from training.build import Build
from training.mesh import batch_devices
from training.step import Batch

SHOWN = 3  # answers that an evaluation shows


class Rollout(NamedTuple):
    """An answer that was drawn to a problem."""

    problem: Problem
    prompt: list[int]
    answer: Answer
    text: str
    reward: float


class Rollouts:
    """A task's questions, and the engine that answers them on the run's mesh, as the source of a step's batch."""

    score = ("pass_at_1", -1)
    loss_is_a_measure = False
    """Advantages sum to zero, so a loss has no size."""
    mixture = None
    why_empty = "each question's answers have one reward"

    def __init__(self, built: Build, questions: Questions, engine: Engine):
        self.built, self.engine = built, engine
        self.task, self.tokenizer = questions.task, questions.tokenizer
        most = built.config.reinforce.held_out
        problems = (self.task.problem(number, True) for number in range(4 * most))
        self.held_out = list(dict.fromkeys(problems))[:most]

    @property
    def config(self) -> Config:
        """Return the run's options."""
        return self.built.config

    def batch(self, step: int, params: dict, should_stop: Callable[[], bool]) -> StepBatch | None:
        """Return the answers to the questions of the step after `step` as its batch, with their figures; None once
        `should_stop()`."""
        answers = self.answers(params, step, should_stop)
        if answers is None:
            return None
        weights, equal_rewards = advantages(answers, self.config.reinforce.samples)
        figures = {
            "reward": sum(one.reward for one in answers) / len(answers),
            "equal_rewards": equal_rewards,
            "tokens_per_answer": sum(len(one.answer.tokens) for one in answers) / len(answers),
        }
        if is_due(step + 1, self.config.log.every_steps):
            figures["entropy"] = self.entropy(params, answers)
        return StepBatch(self.arrays(answers, weights), figures)

    def drawn(
        self, params: dict, asked: Sequence[tuple[Problem, Sampling]], should_stop: Callable[[], bool]
    ) -> list[Rollout] | None:
        """Return an answer to each question, in their order; None once `should_stop()`, asked after each answer. A
        question that leaves no room for an answer has an empty one."""
        self.engine.load(params)
        most = self.engine.capacity
        prompts = {problem: prompt_of(self.tokenizer, problem) for problem, _ in asked}
        answers = [Answer(sampling, 0, 0, finished="length") for _, sampling in asked]
        fitting = [place for place, (problem, _) in enumerate(asked) if len(prompts[problem]) < most]
        wanted = [(prompts[asked[place][0]], asked[place][1], most) for place in fitting]
        try:
            for number, answer in self.engine.answers(wanted):
                answers[fitting[number]] = answer
                if should_stop():
                    return None
        finally:
            self.engine.unload()  # a step needs the memory
        rollouts = []
        for (problem, _), answer in zip(asked, answers):
            text = self.tokenizer.library.decode(answer.tokens, skip_special_tokens=False)
            rollouts.append(Rollout(problem, prompts[problem], answer, text, self.task.reward(problem, text)))
        return rollouts

    def answers(self, params: dict, step: int, should_stop: Callable[[], bool]) -> list[Rollout] | None:
        """Return the answers to the questions of the step after `step`, `samples` to each after the other."""
        options, first = self.config.reinforce, step * self.config.reinforce.prompts
        problems = [self.task.problem(first + i, False) for i in range(options.prompts)]
        seeds = np.random.default_rng([self.config.seed, step]).integers(2**32, size=answers_of_step(self.config))
        samplings = [Sampling(options.temperature, 0, seed=int(seed)) for seed in seeds]
        several = [problem for problem in problems for _ in range(options.samples)]
        return self.drawn(params, list(zip(several, samplings)), should_stop)

    def arrays(self, rollouts: Sequence[Rollout], weights: Float[np.ndarray, "answers"]) -> Batch:
        """Return the answers as a step's batch [K, B, T]. The tokens that the network drew have their answer's weight,
        the others 0. Each answer has an equal part of a row, and is a document of its own.

        A step divides by the targets whose weight is not 0. Drawn tokens count also where their weight is 0, so the
        weights are multiplied by the share of drawn tokens whose weight is not."""
        built, part = self.built, self.config.reinforce.tokens
        rows, length = built.batch_shape[0] * built.batch_shape[1], built.batch_shape[2]
        per_row, bos = length // part, self.tokenizer.bos
        arrays: dict[str, Any] = {name: np.full((rows, length), bos, np.int32) for name in ("inputs", "targets")}
        arrays["weights"] = np.zeros((rows, length), np.float32)
        all_drawn = 0
        for place, (rollout, weight) in enumerate(zip(rollouts, weights)):
            row, start = place // per_row, place % per_row * part
            answer, ids = rollout.answer, [*rollout.prompt, *rollout.answer.tokens, *rollout.answer.end][:part]
            where = slice(start, start + len(ids) - 1)
            arrays["inputs"][row, where], arrays["targets"][row, where] = ids[:-1], ids[1:]
            drawn = [*answer.drawn[: len(answer.tokens)], *(True for _ in answer.end)]
            arrays["weights"][row, start + len(rollout.prompt) - 1 :][: len(drawn)] = weight * np.array(drawn)
            all_drawn += sum(drawn)
        arrays["weights"] *= np.count_nonzero(arrays["weights"]) / max(all_drawn, 1)
        arrays["segment_ids"] = np.cumsum(arrays["inputs"] == bos, axis=-1, dtype=np.int32)
        return whole_to_devices(arrays, built.batch_shape, built.batch_sharding)

    def entropy(self, params: dict, rollouts: Sequence[Rollout]) -> float:
        """Return the mean of -log p of the drawn tokens. With temperature 1 it estimates the policy's entropy."""
        losses, counts = self.built.eval_step(params, self.arrays(rollouts, np.ones(len(rollouts), np.float32)))
        return float(np.sum(np.asarray(losses), dtype=np.float64) / np.asarray(counts).sum())

    def rows_of(self, step: int) -> dict[str, list]:
        """Return nothing: the answers of a step are not kept."""
        return {}

    def describe_step(self, line: dict) -> str:
        """Return the answers' mean reward."""
        return f"reward {line['reward']:.3f}"

    def describe_evaluation(self, results: dict[str, Any]) -> list[str]:
        """Return the figures of an evaluation on held-out questions, each with its interval."""
        most = powers_of_two(self.config.reinforce.samples)[-1]
        names = {"greedy_accuracy": "greedy accuracy", "pass_at_1": "pass@1", f"pass_at_{most}": f"pass@{most}"}

        def with_interval(name: str) -> str:
            interval = results[f"{name}_interval"]
            return f"{results[name]:.3f} ({interval['low']:.3f} to {interval['high']:.3f})"

        return [", ".join(f"{shown} {with_interval(name)}" for name, shown in names.items())]

    def evaluate(self, params: dict, should_stop: Callable[[], bool]) -> dict[str, Any] | None:
        """Return `greedy_accuracy`, and `pass_at_1`, `pass_at_2`, `pass_at_4`, ... of at most `samples` draws, on the
        held-out problems, each with its interval of 95%, and some greedy answers; None once `should_stop()`. An answer
        with reward 1 is right."""
        greedy = self.drawn(params, [(problem, Sampling(0.0)) for problem in self.held_out], should_stop)
        drawn = greedy and self.drawn(params, self.questions_of_evaluation(), should_stop)
        if not greedy or not drawn:
            return None
        figures = figures_of("greedy_accuracy", np.array([one.reward == 1 for one in greedy], float))
        samples = self.config.reinforce.samples
        right = np.array([one.reward == 1 for one in drawn]).reshape(-1, samples)
        for k in powers_of_two(samples):
            figures |= figures_of(f"pass_at_{k}", pass_at(k, right))
        shown = [f"reward {one.reward:g}: {one.problem.question}\n{one.text}" for one in greedy[:SHOWN]]
        return figures | {"samples": shown}

    def questions_of_evaluation(self) -> list[tuple[Problem, Sampling]]:
        """Return the held-out problems, `samples` times each, with a seed for each draw: a function of the run's seed
        and of the numbers of problem and draw. Prompts of one length with one seed would share all random numbers."""
        options = self.config.reinforce
        asked = []
        for number, problem in enumerate(self.held_out):
            # The last number keeps them apart from the seeds of step `number`.
            seeds = np.random.default_rng([self.config.seed, number, 1]).integers(2**32, size=options.samples)
            asked += [(problem, Sampling(options.temperature, 0, seed=int(seed))) for seed in seeds]
        return asked


def rollouts_of(built: Build, questions: Questions) -> Callable[[ResumePoint], Rollouts]:
    """Return the function from a point to the rollouts of a run after it: the same from any point. Their engine has as
    many slots as a micro-batch has answers."""
    config = built.config
    per_row = config.batch.sequence_length // config.reinforce.tokens
    slots = config.batch.rows * per_row * batch_devices(built.mesh)
    short = with_options(config, {"batch.sequence_length": config.reinforce.tokens})  # the caches' rows
    network = Network(short, questions.tokenizer, {}, built.network)
    rollouts = Rollouts(built, questions, Engine(network, min(slots, answers_of_step(config))))
    return lambda start: rollouts


def whole_to_devices(batch: dict[str, np.ndarray], shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    """Return a batch that every process has whole as the global arrays [K, B, T]."""
    place = partial(jax.make_array_from_callback, shape, sharding)
    return {name: place(array.reshape(shape).__getitem__) for name, array in batch.items()}


def advantages(rollouts: Sequence[Rollout], samples: int) -> tuple[Float[np.ndarray, "answers"], float]:
    """Return each answer's reward less the mean of its question's answers, and the share of questions whose answers
    all have one reward: their advantages are exactly 0."""
    rewards = np.array([rollout.reward for rollout in rollouts]).reshape(-1, samples)
    equal = rewards.max(axis=1) == rewards.min(axis=1)
    weights = np.where(equal[:, None], 0, rewards - rewards.mean(axis=1, keepdims=True))  # a mean may be rounded
    return weights.ravel().astype(np.float32), float(equal.mean())


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to `most`."""
    return [2**i for i in range(most.bit_length())]


def pass_at(k: int, right: Bool[np.ndarray, "problems samples"]) -> Float[np.ndarray, "problems"]:
    """Return for each problem an unbiased estimate of the probability that one of `k` draws is right
    (arXiv:2107.03374)."""
    samples = right.shape[1]
    wrong = (~right).sum(axis=1).tolist()
    return np.array([1 - comb(count, k) / comb(samples, k) for count in wrong])


def figures_of(name: str, shares: Float[np.ndarray, "problems"]) -> dict[str, Any]:
    """Return the mean over problems of their shares of right answers, and its interval of 95%."""
    low, high = mean_share_interval(shares)
    return {name: float(shares.mean()), f"{name}_interval": {"low": low, "high": high}}
