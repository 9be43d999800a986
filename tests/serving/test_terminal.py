"""Test chat.py in a terminal, and the conversation behind it."""

import io
import re
import signal
import sys
from dataclasses import replace

import pytest

import chat
from data.conversation import render
from generation.engine import Engine
from interchange.convert import write_run
from model.sampling import Sampling
from options.schema import with_options
from run.network import Network
from serving.terminal import Terminal
from system.errors import UserError
from tests.generation.networks import GREEDY, LENGTH, SPECIAL, TOKENIZER, chain, network

ASK, END = SPECIAL["<|assistant_start|>"], SPECIAL["<|assistant_end|>"]
LETTERS = {text: TOKENIZER.encode([text])[0] for text in ("Zé€!", "xy")}


def talk(monkeypatch, folder, ours: Network, *options: str, lines: str = "") -> int:
    """Return the exit code of chat.py with this network, whose user types `lines`."""
    if not folder.exists():
        config = with_options(ours.config, {"data.packing": "whole"})  # it was fine-tuned
        write_run(folder, config, 1, ours.tokenizer, ours.params)
    monkeypatch.setattr(sys, "argv", ["chat", f"--run_dir={folder}", "--temperature=0", *options])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    return chat.main()


@pytest.mark.medium
def test_lines_of_a_pipe_and_one_prompt_are_answered_alone(tmp_path, monkeypatch, capsys):
    ours, folder = chain(ASK, *LETTERS["Zé€!"], END), tmp_path / "short"
    assert talk(monkeypatch, folder, ours, lines="hello\n\n/help\nagain\n") == 0
    seen = capsys.readouterr()
    assert seen.out == "Zé€!\nZé€!\n" and "192 tokens a row" in seen.err and "/regenerate  another answer" in seen.err
    assert talk(monkeypatch, folder, ours, "--prompt=hello", "--tokens=2") == 0
    assert capsys.readouterr() == ("Z\n", "(an answer has at most 2 tokens)\n")


def test_a_network_without_tokens_of_conversations_is_a_mistake(tmp_path, monkeypatch):
    plain = replace(TOKENIZER, json=TOKENIZER.json.replace("<|assistant_end|>", "<|other|>"))
    with pytest.raises(UserError, match=f"--config=configs/chat.py --init_from={tmp_path}/base"):
        talk(monkeypatch, tmp_path / "base", replace(network(), tokenizer=plain))


@pytest.mark.medium
def test_ctrl_c_stops_an_answer_and_then_at_the_prompt_the_chat(monkeypatch, capsys):
    x, y = LETTERS["xy"]
    engine, typed, left = Engine(chain(ASK, x, y, x)), iter(["hello", "/regenerate", None, "", None, None]), []

    def step():
        left[:] = left[1:] or range(20)
        if len(left) == 1:
            signal.raise_signal(signal.SIGINT)
        return Engine.step(engine)

    def read(prompt: str) -> str:
        if (line := next(typed)) is None:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr(engine, "step", step)
    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    Terminal(engine, GREEDY).run()
    out, err = capsys.readouterr()
    assert re.fullmatch("((xy){8,}x?\n){2}", out) and engine.free == 1
    assert err.splitlines() == ["(stopped)"] * 2 + ["(Ctrl-C again ends the chat)"] * 2


@pytest.fixture(scope="module")
def engine():
    return Engine(network())


@pytest.mark.medium
def test_a_turn_reads_its_own_tokens_and_regenerate_draws_with_the_next_seed(engine, monkeypatch, capsys):
    prompts, answers, begin = [], [], engine.begin

    def noted(prompt, *arguments):
        prompts.append(prompt)
        answers.append(begin(prompt, *arguments))
        return answers[-1]

    monkeypatch.setattr(engine, "begin", noted)
    terminal = Terminal(engine, Sampling(1.0, 0, seed=7), "sys", 10)
    terminal.say("to be")
    assert prompts[0] == render(TOKENIZER, [{"role": "user", "content": "sys\n\nto be"}], ask=True)
    terminal.say("or not")
    turn = [*prompts[0], *answers[0].tokens, END]
    assert prompts[1] == turn + render(TOKENIZER, [{"role": "user", "content": "or not"}], ask=True)[1:]
    assert answers[1].read <= len(prompts[1]) - len(turn) + 2
    terminal.obey("/regenerate")
    assert prompts[2] == prompts[1] and answers[2].read == 1 and answers[2].sampling.seed == 8
    assert answers[2].tokens != answers[1].tokens and terminal.turns[1].answer == answers[2].tokens
    terminal.obey("/reset")
    assert terminal.turns == []


@pytest.mark.medium
def test_the_effect_of_a_full_row_is_announced(engine, capsys):
    terminal = Terminal(engine, GREEDY, "Be brief.", 20)
    for number in range(9):
        terminal.say(f"message number {number}")
    notes = [note for note in re.findall(r"\((.*)\)\n", capsys.readouterr().err) if "oldest" in note]
    assert re.fullmatch(r"the conversation has 1\d\d tokens: beyond 144 its oldest turns are left out", notes[0])
    assert re.fullmatch(r"the oldest \d of \d turns are left out from here on", notes[1])
    assert terminal.turns[-1].text == "message number 8"
    assert len(terminal.prompt()) <= LENGTH
    assert "Be brief.\n\nmessage" in TOKENIZER.decode(terminal.prompt()[:40])
    turns = terminal.turns.copy()
    with pytest.raises(UserError, match="leave room for an answer"):
        terminal.say("letters " * 50)
    assert terminal.turns == turns
