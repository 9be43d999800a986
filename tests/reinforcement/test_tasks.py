"""Test the tasks: their problems, their held-out problems, and their rewards."""

import pytest

from data.conversation import document_of, render
from options.schema import ReinforceConfig
from reinforcement.tasks import GSM8K, Problem, Sums, in_words
from system.errors import UserError
from tests.evaluation.chat_sets import make_sets, tokenizer

SUMS = Sums(ReinforceConfig(difficulty=2), 7, "")


@pytest.mark.parametrize(
    "number, expected",
    [
        (0, "zero"),
        (13, "thirteen"),
        (40, "forty"),
        (99, "ninety-nine"),
        (100, "one hundred"),
        (315, "three hundred fifteen"),
        (70_021, "seventy thousand twenty-one"),
        (999_999, "nine hundred ninety-nine thousand nine hundred ninety-nine"),
    ],
)
def test_numbers_are_written_in_words(number, expected):
    assert in_words(number) == expected


def test_problems_are_a_function_of_seed_and_number_and_none_is_held_out_and_learned():
    some, others = ({SUMS.problem(number, held_out) for number in range(600)} for held_out in (False, True))
    assert some.isdisjoint(others) and len(some) > 500 and len(others) > 300
    assert SUMS.problem(5, False) == Sums(ReinforceConfig(difficulty=2), 7, "").problem(5, False)
    assert SUMS.problem(5, False) != Sums(ReinforceConfig(difficulty=2), 8, "").problem(5, False)
    for number in range(20):
        (a, b), problem = SUMS.pair(number, True), SUMS.problem(number, True)
        assert problem == (f"What is {in_words(a)} plus {in_words(b)}?", str(a + b)) and max(a, b) < 100


@pytest.mark.parametrize(
    "text, reward",
    [
        ("#### 1000", 1),
        ("It is 9. #### 1,000 dollars", 1),
        ("<|output_start|>1000<|output_end|>#### 1000", 1),
        ("1000", 0),
        ("#### 100", 0),
        ("#### 1000.5", 0),
        ("", 0),
    ],
)
def test_an_answer_is_right_if_the_number_after_the_mark_is_exactly_the_answer(text, reward):
    assert SUMS.reward(Problem("", "1000"), text) == reward


def test_conversations_are_right_and_call_the_calculator_in_one_of_three():
    for number in range(8):
        question, answer = messages = SUMS.conversation(number)
        document_of(messages)
        problem, tools = SUMS.problem(number, False), number % 3 == 0
        text = tokenizer().library.decode(render(tokenizer(), messages[1:]), skip_special_tokens=False)
        assert question["content"] == problem.question and SUMS.reward(problem, text) == 1
        assert ("<|python_start|>" in text) == tools and len(answer["content"]) == 1 + 2 * tools


def test_gsm8k_takes_every_problem_once_in_an_epoch_and_needs_a_bundle(tmp_path):
    make_sets(tmp_path)
    with pytest.raises(UserError, match="no file gsm8k/main/train"):
        GSM8K(ReinforceConfig(), 0, str(tmp_path))
    test = tmp_path / "gsm8k/main/test-00000-of-00001.parquet"
    test.with_name("train-00000-of-00001.parquet").write_bytes(test.read_bytes())
    task = GSM8K(ReinforceConfig(), 0, str(tmp_path))
    epochs = [[task.problem(9 * epoch + i, False) for i in range(9)] for epoch in range(2)]
    assert len({*epochs[0]}) == 9 and {*epochs[0]} == {*epochs[1]} and epochs[0] != epochs[1]
    assert {problem.answer for problem in epochs[0]} == {"3", "1000"}
    with pytest.raises(UserError, match="task=gsm8k needs --eval"):
        GSM8K(ReinforceConfig(), 0, "")
