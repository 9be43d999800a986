"""Use chat.py in a terminal of its own, and test the conversation behind it."""

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from data.conversation import render
from evaluation.engine import Engine
from evaluation.network import Network
from interchange.safetensors import arrays_of, write_safetensors
from model.sampling import Sampling
from serving.terminal import Terminal
from tests.evaluation.test_engine import GREEDY, LENGTH, SPECIAL, TOKENIZER, chain, network

ASK, END = SPECIAL["<|assistant_start|>"], SPECIAL["<|assistant_end|>"]
LETTERS = {text: TOKENIZER.encode([text])[0] for text in ("Zé€!", "xy")}


def written(folder, ours: Network):
    write_safetensors(folder, [arrays_of(jax.device_get(ours.params))], ours.config, ours.tokenizer)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return two folders of networks: one answers Zé€!, the other never ends."""
    made = tmp_path_factory.mktemp("networks")
    x, y = LETTERS["xy"]
    endless = chain(ASK, x, y, x)
    endless = replace(
        endless, config=replace(endless.config, batch=replace(endless.config.batch, sequence_length=9000))
    )
    return written(made / "short", chain(ASK, *LETTERS["Zé€!"], END)), written(made / "endless", endless)


def command(folder, *options):
    return [sys.executable, "chat.py", f"--run_dir={folder}", "--temperature=0", *options]


class Typed:
    """A terminal that runs chat.py."""

    def __init__(self, arguments):
        self.screen, inner = pty.openpty()
        own = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C must reach it
        self.process = subprocess.Popen(
            arguments, stdin=inner, stdout=inner, stderr=inner, start_new_session=True, preexec_fn=own
        )
        os.close(inner)
        self.seen = b""

    def until(self, pattern: str, seconds: float = 300) -> str:
        """Wait for output that matches `pattern`, and return the output up to the match. Later calls start after it."""
        limit = time.monotonic() + seconds
        while not (match := re.search(pattern.encode(), self.seen)):
            assert time.monotonic() < limit, (pattern, self.seen[-2000:])
            if select.select([self.screen], [], [], 1)[0]:
                try:
                    self.seen += os.read(self.screen, 65536)
                except OSError as error:
                    raise AssertionError((pattern, self.seen[-2000:])) from error
        shown, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return shown.decode()

    def types(self, text: str) -> None:
        os.write(self.screen, text.encode())

    def interrupts(self) -> None:
        """Press Ctrl-C at the prompt, once readline waits for a key: between the two it would see no signal."""
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.01)
        self.types("\x03")


@contextmanager
def typed(arguments):
    terminal = Typed(arguments)
    try:
        yield terminal
    finally:
        if terminal.process.poll() is None:
            os.killpg(terminal.process.pid, signal.SIGKILL)
        terminal.process.wait()
        os.close(terminal.screen)


@pytest.mark.medium
def test_ctrl_c_stops_an_answer_and_then_at_the_prompt_the_chat(folders):
    with typed(command(folders[1])) as terminal:
        assert "9000 tokens a row" in terminal.until("> ")
        for line in "hello\n", "/regenerate\n":
            terminal.types(line)
            terminal.until("(xy){8}")
            terminal.types("\x03")
            stopped = terminal.until(r"\(stopped\)\r\n")
            assert set(stopped.split("^C")[0]) <= set("xy")
            terminal.until("> ")
        terminal.types("/help\n")
        terminal.until("/regenerate  another answer(.|\n)*> ")
        terminal.interrupts()
        terminal.until(r"Ctrl-C again ends the chat\)\r\n> ")
        terminal.interrupts()
        assert terminal.process.wait(60) == 0


@pytest.mark.medium
def test_lines_of_a_pipe_and_one_prompt_are_answered_alone(folders):
    done = subprocess.run(command(folders[0]), input="hello\n\nagain\n", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "Zé€!\nZé€!\n"), done.stderr
    done = subprocess.run(command(folders[0], "--prompt=hello", "--tokens=2"), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Z\n", "(an answer has at most 2 tokens)\n")


def test_a_network_without_tokens_of_conversations_is_a_mistake(tmp_path):
    plain = replace(TOKENIZER, json=TOKENIZER.json.replace("<|assistant_end|>", "<|other|>"))
    folder = written(tmp_path / "base", replace(network(), tokenizer=plain))
    done = subprocess.run(command(folder), capture_output=True, text=True)
    assert done.returncode == 2 and f"--config=configs/chat.py --init_from={folder}" in done.stderr


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
    with pytest.raises(Exception, match="leave room for an answer"):
        terminal.say("letters " * 50)
    assert terminal.turns == turns
