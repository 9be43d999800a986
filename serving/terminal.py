"""A conversation in a terminal."""

import re
import signal
import sys
from dataclasses import dataclass, field

from data.conversation import render
from generation.engine import Answer, Engine
from model.sampling import Sampling
from serving.text import AnswerText, shown
from system.errors import UserError

HELP = """/regenerate  another answer to your last message
/reset       a new conversation
/help        this
/quit        the end, as Ctrl-D
Ctrl-C stops an answer."""
ROOM = 1 / 4  # least share of a row for an answer: the oldest turns make room
NEAR = 0.8  # share of the turns' room: beyond it, a notice says that the oldest will be left out
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # codes that move a cursor, and the like


@dataclass
class Turn:
    """A user's message, and the answer's tokens, if there is an answer."""

    text: str
    answer: list[int] | None = None


def note(text: str) -> None:
    """Print a notice."""
    print(f"({text})", file=sys.stderr, flush=True)


@dataclass
class Terminal:
    """A conversation with an engine of one slot, which keeps what it has read from turn to turn."""

    engine: Engine
    sampling: Sampling
    system: str = ""
    """System message before the first message."""
    most: int | None = None
    """Most tokens of an answer."""
    turns: list[Turn] = field(default_factory=list)
    warned: bool = False
    """True once the user was notified that turns will be left out."""

    def prompt(self) -> list[int]:
        """Return the tokens of the conversation, up to the start of the answer that comes next."""
        tokenizer = self.engine.tokenizer
        tokens = [tokenizer.bos]
        for number, turn in enumerate(self.turns):
            text = f"{self.system}\n\n{turn.text}" if self.system and number == 0 else turn.text
            tokens += render(tokenizer, [{"role": "user", "content": text}], ask=True)[1:]
            if turn.answer is not None:
                tokens += [*turn.answer, tokenizer.special_tokens["<|assistant_end|>"]]
        return tokens

    def say(self, text: str) -> None:
        """Answer a message. Raise UserError, without adding a turn, if there is no room for it."""
        before = self.turns.copy()
        self.turns.append(Turn(text))
        try:
            self.answer()
        except UserError:
            self.turns = before
            raise

    def answer(self) -> None:
        """Write an answer to the last turn while it is drawn. Oldest turns are left out if they leave no room."""
        turns = len(self.turns)
        while len(self.turns) > 1 and len(self.prompt()) > self.limit:
            del self.turns[0]
        answer = self.engine.begin(self.prompt(), self.sampling, self.most)
        if left_out := turns - len(self.turns):
            note(f"the oldest {left_out} of {turns} turns are left out from here on")
            self.warned = False
        self.turns[-1].answer = answer.tokens
        if self.stream(answer):
            note("stopped")
        elif answer.finished == "length":
            full = len(answer.tokens) != self.most
            note("the row is full: the answer ends here" if full else f"an answer has at most {self.most} tokens")
        used = len(self.prompt())
        if used > NEAR * self.limit and not self.warned:
            note(f"the conversation has {used} tokens: beyond {self.limit} its oldest turns are left out")
            self.warned = True

    @property
    def limit(self) -> int:
        """Return how many tokens the turns may have."""
        return self.engine.capacity - max(1, int(ROOM * self.engine.capacity))

    def stream(self, answer: Answer) -> bool:
        """Write the text of an answer as far as its characters are complete. Return whether Ctrl-C stopped it."""
        stopped, text = False, AnswerText(self.engine.tokenizer)

        def stop(*_: object) -> None:
            nonlocal stopped
            stopped = True
            signal.signal(signal.SIGINT, before)  # a second Ctrl-C gets it, if the engine takes long

        before = signal.signal(signal.SIGINT, stop)
        try:
            while not (answer.finished or stopped):
                for _, token in self.engine.step():  # not to be interrupted: its cache would be lost
                    print(CONTROL.sub("\ufffd", shown(text.add(token))), end="", flush=True)
        finally:
            signal.signal(signal.SIGINT, before)
            self.engine.drop(answer)
        print(CONTROL.sub("\ufffd", shown(text.add(None))), flush=True)
        return stopped

    def obey(self, command: str) -> None:
        """Execute a command: a line that begins with /."""
        if command == "/reset":
            self.turns, self.warned = [], False
            note("a new conversation")
        elif command == "/regenerate" and self.turns:
            self.sampling = self.sampling._replace(seed=self.sampling.seed + 1)
            self.turns[-1].answer = None
            self.answer()
        elif command == "/regenerate":
            note("there is no answer yet")
        else:
            print(HELP if command == "/help" else f"{command} is unknown\n{HELP}", file=sys.stderr, flush=True)

    def run(self) -> None:
        """Answer each line until the input ends."""
        typed = sys.stdin.isatty()
        if typed:
            import readline  # noqa: F401  (input() edits lines with it)
        sys.stdin.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
        leaving = False
        while True:
            try:
                line = input("> " if typed else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                if leaving:
                    return
                leaving = True
                note("Ctrl-C again ends the chat")
                continue
            leaving = False
            if line == "/quit":
                return
            try:
                if line.startswith("/"):
                    self.obey(line)
                elif line:
                    self.say(line)
            except UserError as error:
                note(str(error))
