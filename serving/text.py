"""An answer's tokens as text and parts, while they come."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from data.tokenizer import CHAT_TOKENS, TextTokenizer

PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END = CHAT_TOKENS[4:]
SHOWN = {PYTHON_START: "`", PYTHON_END: "`", OUTPUT_START: " = `", OUTPUT_END: "` "}  # a call reads `2+2` = `4`
OPENS = {PYTHON_START: "python", OUTPUT_START: "python_output"}


class Piece(NamedTuple):
    """A piece of an answer: of its text, and of one of its parts (data/conversation.py)."""

    shown: str
    """Text, with the marks around a call and its result."""
    part: int
    """Number of the part, from 0."""
    kind: str
    """The part's type: text, python or python_output."""
    text: str
    """Text of the part, without marks."""


def shown(pieces: Sequence[Piece]) -> str:
    """Return the pieces as text."""
    return "".join(piece.shown for piece in pieces)


def calls(pieces: Sequence[Piece]) -> bool:
    """Return whether a call of the calculator is among the pieces."""
    return any(piece.kind != "text" for piece in pieces)


def parts(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """Return the parts of an answer that the pieces belong to, each with its `index`, as OpenAI's clients join them."""
    joined: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        part = joined.setdefault(piece.part, {"index": piece.part, "type": piece.kind, "text": ""})
        part["text"] += piece.text
    return list(joined.values())


class AnswerText:
    """Turns tokens into the certain pieces of an answer: complete characters, and nothing that may become one of
    `stops`, before which the text ends."""

    def __init__(self, tokenizer: TextTokenizer, stops: Sequence[str] = ()):
        self.tokenizer, self.stops = tokenizer, [stop for stop in stops if stop]
        self.names = {tokenizer.special_tokens[name]: name for name in SHOWN if name in tokenizer.special_tokens}
        self.tokens: list[int] = []
        """The last tokens with text, `given` in number, and those after them."""
        self.given = 0
        self.kept: list[Piece] = []
        """Pieces that may become a stop."""
        self.last: Piece | None = None
        """The newest piece of the part that continues, if one does."""
        self.count = 0
        """Number of parts."""
        self.stopped = False

    def add(self, token: int | None) -> list[Piece]:
        """Return the pieces that a token adds, or, with None, the rest at the answer's end."""
        name = self.names.get(token) if token is not None else None
        if token is not None and not name:
            self.tokens.append(token)
        before, now = (self.tokenizer.decode(tokens) for tokens in (self.tokens[: self.given], self.tokens))
        is_whole = token is None or name or not now.endswith("\ufffd")
        if len(now) > len(before) and is_whole:
            self._append(now[len(before) :].rstrip("\ufffd"))
            self.tokens, self.given = self.tokens[self.given :], len(self.tokens) - self.given
        if name:
            self._append_mark(name)
        return self._take(self._certain(is_end=token is None))

    def _append(self, text: str) -> None:
        """Keep a text, of the part that continues or of a new one."""
        if text:
            self._keep(Piece(text, *self._part(), text))

    def _append_mark(self, name: str) -> None:
        """Keep the mark of a special token, which begins or ends a part."""
        if name in OPENS:
            self.last = None
        self._keep(Piece(SHOWN[name], *self._part(OPENS.get(name, "text")), ""))
        if name not in OPENS:
            self.last = None

    def _part(self, kind: str = "text") -> tuple[int, str]:
        """Return the number and the type of the part that continues, or of a new one of this type."""
        return (self.last.part, self.last.kind) if self.last else (self.count, kind)

    def _keep(self, piece: Piece) -> None:
        self.kept.append(piece)
        self.last, self.count = piece, piece.part + 1

    def _certain(self, is_end: bool) -> int:
        """Return how many of the characters that are kept are certain, and note whether a stop is among them."""
        text = shown(self.kept)
        ends = [text.find(stop) for stop in self.stops if stop in text]
        self.stopped = bool(ends)
        if ends:
            return min(ends)
        begun = [stop[:n] for stop in self.stops for n in range(1, min(len(stop), len(text) + 1))]
        return len(text) - max((len(part) for part in begun if text.endswith(part) and not is_end), default=0)

    def _take(self, characters: int) -> list[Piece]:
        """Return the first characters that are kept, as pieces, and keep the others."""
        taken, kept = [], []
        for piece in self.kept:
            here = min(len(piece.shown), characters)
            if here:
                taken.append(piece._replace(shown=piece.shown[:here], text=piece.text[:here]))
            if here < len(piece.shown):
                kept.append(piece._replace(shown=piece.shown[here:], text=piece.text[here:]))
            characters -= here
        self.kept = kept
        return taken
