"""Test a step's advantages, its batch, and that the split of the batch does not change the step."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from data.tokenizer import CHAT_TOKENS
from generation.engine import Answer, Engine
from model.sampling import Sampling
from options.schema import MeshConfig, ReinforceConfig, with_options
from reinforcement.questions import Questions
from reinforcement.rollouts import Rollout, Rollouts, advantages, figures_of, pass_at
from reinforcement.tasks import Problem, Sums
from tests.generation.networks import SPECIAL, TOKENIZER
from tests.helpers import ALL_FEATURES, built_on, distance, initial_state, perturbed, tiny_config
from training.mesh import resized
from training.state import stored_as

ANSWERS = 16
NOT_USED = Mock(spec=Engine)
TINY = with_options(
    tiny_config(rows=8, rows_per_device=8, length=128, **ALL_FEATURES | {"kv_heads": 4}),
    {"data.mask_documents": True, "reinforce": ReinforceConfig(samples=4, prompts=4, tokens=64, held_out=3)},
)


def rollout(reward: float, length: int = 3, seed: int = 0) -> Rollout:
    """Return an answer of `length` drawn tokens."""
    draw = np.random.default_rng([seed, length])
    prompt = [TOKENIZER.bos, *draw.integers(10, 272, 4).tolist()]
    answer = Answer(Sampling(), 64, 0, draw.integers(10, 272, length).tolist(), [True] * length, [9], "stop")
    return Rollout(Problem("", ""), prompt, answer, "", reward)


def rollouts_on(split: tuple[int, int, int, int], engine: Engine = NOT_USED, **options: Any) -> Rollouts:
    """Return the rollouts of a run on a mesh (data, fsdp, tensor) with these rows per device, by default without an
    engine. `options`: of reinforcement."""
    *mesh, rows = split
    config = replace(TINY, mesh=MeshConfig(*mesh), batch=replace(TINY.batch, rows_per_device=rows))
    config = replace(config, reinforce=replace(config.reinforce, **options))
    questions = Questions("sums", Sums(config.reinforce, 0, ""), TOKENIZER, "")
    built = built_on(replace(config, reinforce=TINY.reinforce), int(np.prod(mesh)))._replace(config=config)
    return Rollouts(built, questions, engine)


def test_an_advantage_is_a_reward_less_its_question_s_mean_and_exactly_0_for_equal_rewards():
    rewards = [1, 0, 0, 0, 1, 1, 1, 1, 0.1, 0.1, 0.1, 0.1, 2, 1, 1, 0]
    weights, equal = advantages([rollout(reward) for reward in rewards], 4)
    assert weights.tolist() == [0.75, -0.25, -0.25, -0.25, *[0] * 8, 1, 0, 0, -1] and equal == 0.5
    weights, equal = advantages([rollout(reward) for reward in (0.1, 0.1, 0.1)], 3)  # whose mean is rounded
    assert not weights.any() and equal == 1


def test_the_divisor_counts_all_drawn_tokens_also_those_whose_advantage_is_0():
    """Compare graded rewards, of which half equal their question's mean, with rewards that differ from them by 1e-6."""
    ours, lengths = rollouts_on((1, 1, 1, 8)), [3, 9, 30, 5]

    def contributions(rewards: list[float]) -> np.ndarray:
        some = [rollout(reward, length) for reward, length in zip(rewards, lengths)]
        weights = np.asarray(ours.arrays(some, advantages(some, 4)[0])["weights"])
        return weights / np.count_nonzero(weights)  # as the step divides

    graded, near = contributions([1, 0, 0.5, 0.5]), contributions([1, 0, 0.5 + 1e-6, 0.5 - 1e-6])
    assert np.abs(graded - near).max() < 1e-6 and graded.max() == pytest.approx(0.5 / sum(lengths + np.ones(4)))


def test_only_tokens_that_the_network_drew_have_the_advantage():
    call, end = [SPECIAL[name] for name in CHAT_TOKENS[4:]], SPECIAL["<|assistant_end|>"]
    tokens = [call[0], 20, call[1], call[2], 30, call[3], 40]
    drawn = [True, True, True, False, False, False, True]
    called = Answer(Sampling(), 64, 0, tokens, drawn, [end], "stop")
    cut = Answer(Sampling(), 64, 0, tokens[:4], drawn[:6], [], "length")
    some = [Rollout(Problem("", ""), [TOKENIZER.bos, 50, 51], answer, "", 1) for answer in (called, cut)]
    placed = rollouts_on((1, 1, 1, 8)).arrays(some, np.array([0.5, -0.25], np.float32))
    batch = {name: np.asarray(array).reshape(8, 128) for name, array in placed.items()}
    assert batch["inputs"][0, :10].tolist() == [TOKENIZER.bos, 50, 51, *tokens]
    assert batch["targets"][0, :10].tolist() == [50, 51, *tokens, end]
    assert batch["weights"][0, :10].tolist() == [0, 0, 0.5, 0.5, 0.5, 0, 0, 0, 0.5, 0.5]
    assert batch["targets"][0, 64:70].tolist() == [50, 51, *tokens[:4]]
    assert batch["weights"][0, 64:70].tolist() == [0, 0, -0.25, -0.25, -0.25, 0]
    assert np.count_nonzero(batch["weights"]) == 8  # the step's divisor
    same = batch["segment_ids"][0, :, None] == batch["segment_ids"][0]
    assert same[:10, :10].all() and same[64:70, 64:70].all() and not same[:10, 10:].any()


@pytest.mark.medium
def test_equal_answers_give_equal_parameters_in_micro_batches_on_a_mesh_of_all_axes():
    """Take two steps on answers of 1 to 50 tokens, of which half have the mean reward of their question. The whole step
    in one micro-batch is the measure."""
    lengths, rewards = np.geomspace(1, 50, ANSWERS).round().astype(int), np.resize([1, 0, 0.5, 0.5], ANSWERS)
    after = []
    for ours in map(rollouts_on, ((1, 1, 1, 8), (2, 2, 2, 1))):
        state = initial_state(TINY.model, TINY.optimizer)
        state = stored_as(state._replace(params=perturbed(state.params)), ours.built.abstract_state)
        for step in range(2):
            some = [rollout(reward, size, step) for reward, size in zip(rewards, lengths)]
            weights, _ = advantages(some, 4)
            state, metrics = ours.built.train_step(state, ours.arrays(some, weights))
        like = initial_state(TINY.model, TINY.optimizer).params
        params = jax.tree.map(lambda leaf, shape: resized(np.asarray(leaf), shape.shape), state.params, like)
        after.append((params, float(metrics["grad_norm"]), int(metrics["valid_tokens"])))
    (whole, norm, tokens), (divided, other_norm, other_tokens) = after
    assert tokens == other_tokens == sum(lengths[rewards != 0.5] + 1) and norm == pytest.approx(other_norm, rel=1e-4)
    assert distance(divided, whole) < 1e-5


def test_a_question_without_room_has_an_empty_answer_and_no_weight():
    class Echo(Engine):
        """Answer each question that it gets with its own tokens."""

        def __init__(self):
            self.capacity = 20

        def load(self, params):
            pass

        def answers(self, wanted):
            yield from reversed(
                [(i, Answer(asked[1], 9, 0, asked[0][1:], [True] * 9)) for i, asked in enumerate(wanted)]
            )

    ours = rollouts_on((1, 1, 1, 8), Echo())
    asked = [(Problem(question, "1"), Sampling(seed=i)) for i, question in enumerate(("to", "to be " * 90, "or"))]
    some = ours.drawn({}, asked, lambda: False)
    assert [one.answer.sampling.seed for one in some] == [0, 1, 2] and not some[1].answer.tokens
    assert some[0].answer.tokens == some[0].prompt[1:] and len(some[1].prompt) > 64
    batch = np.asarray(ours.arrays(some, np.ones(3, np.float32))["weights"]).reshape(8, 128)
    assert batch[0, :64].any() and not batch[0, 64:].any() and batch[1, :64].any()
    assert ours.drawn({}, asked, lambda: True) is None


def held_out(problems: int, samples: int) -> Rollouts:
    """Return rollouts with this many held-out problems, without an engine."""
    ours = rollouts_on((1, 1, 1, 8), samples=samples)
    ours.held_out = [Problem(str(number), "1") for number in range(problems)]
    return ours


def test_no_two_draws_of_an_evaluation_or_a_step_share_their_seed(monkeypatch):
    ours, of_steps = held_out(128, 16), []
    monkeypatch.setattr(Rollouts, "drawn", lambda self, params, questions, stop: of_steps.extend(questions))
    ours.answers({}, 0, lambda: False)
    asked = ours.questions_of_evaluation()
    assert [problem for problem, _ in asked] == [problem for problem in ours.held_out for _ in range(16)]
    assert len({sampling.seed for _, sampling in [*asked, *of_steps]}) == 128 * 16 + 4 * 16
    assert held_out(2, 16).questions_of_evaluation() == asked[:32]  # a function of problem and draw


def test_an_evaluation_has_the_greedy_accuracy_and_pass_at_every_power_of_two(monkeypatch):
    """Draw 6 answers to each of 2 problems, of which 0 and 3 are right. The greedy answers are right."""
    ours = held_out(2, 6)

    def drawn(self, params, questions, should_stop):
        rewards = [1, 1] if len(questions) == 2 else [0, 0.5, 0, 0, 0, 0, 1, 0, 1, 0, 0, 1]
        return [rollout(reward) for reward in rewards]

    monkeypatch.setattr(Rollouts, "drawn", drawn)
    figures = ours.evaluate({}, lambda: False)
    assert figures["greedy_accuracy"] == 1 and "pass_at_6" not in figures and "pass_at_8" not in figures
    # One less the share of sets of k draws that are all wrong: 3 of 6, 3 of 15, 0 of 15.
    for k, of_second in ((1, 1 / 2), (2, 4 / 5), (4, 1)):
        assert figures[f"pass_at_{k}"] == pytest.approx(of_second / 2)


def test_pass_at_k_is_unbiased_and_95_percent_of_its_intervals_have_the_true_mean():
    generator, trials = np.random.default_rng(0), 400
    covered, means = {1: 0, 4: 0, 16: 0}, {1: [], 4: [], 16: []}
    truth = {k: 1 - 3 / (3 + k) for k in means}  # the mean of 1 - (1 - p)^k if p has the density 3 (1 - p)^2
    for _ in range(trials):
        chance = generator.beta(1, 3, 128)
        right = generator.random((128, 16)) < chance[:, None]
        for k in means:
            figures = figures_of("pass", pass_at(k, right))
            means[k].append(figures["pass"])
            covered[k] += figures["pass_interval"]["low"] <= truth[k] <= figures["pass_interval"]["high"]
    for k in means:
        assert np.mean(means[k]) == pytest.approx(truth[k], abs=4 * np.std(means[k]) / trials**0.5)
        assert 0.92 <= covered[k] / trials <= 0.98


@pytest.mark.parametrize("right, of, low, high", [(0, 10, 0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1)])
def test_the_interval_is_wilson_s(right, of, low, high):
    interval = figures_of("pass", (np.arange(of) < right).astype(float))["pass_interval"]
    assert (interval["low"], interval["high"]) == pytest.approx((low, high), abs=1e-4)


def test_answers_are_a_function_of_seed_and_step(monkeypatch):
    ours, asked = rollouts_on((1, 1, 1, 8)), []
    monkeypatch.setattr(Rollouts, "drawn", lambda self, params, questions, stop: asked.append(questions))
    for step in (0, 1, 0):
        ours.answers({}, step, lambda: False)
    assert asked[0] == asked[2] and len(asked[0]) == ANSWERS
    assert len({problem for problem, _ in asked[0] + asked[1]}) == 8
    assert len({sampling.seed for _, sampling in asked[0] + asked[1]}) == 2 * ANSWERS
