"""An answer's tokens as text, while they come."""

from collections.abc import Sequence

from data.tokenizer import CHAT_TOKENS, TextTokenizer

SHOWN = dict(zip(CHAT_TOKENS[4:], ("`", "`", " = `", "` ")))  # a call of the calculator reads `2+2` = `4`


class AnswerText:
    """Turns tokens into the certain part of an answer's text: complete characters, and nothing that may become one
    of `stops`, before which the text ends."""

    def __init__(self, tokenizer: TextTokenizer, stops: Sequence[str] = ()):
        self.tokenizer, self.stops = tokenizer, [stop for stop in stops if stop]
        self.shown: dict[int | None, str] = {tokenizer.special_tokens[name]: text for name, text in SHOWN.items()}
        self.tokens: list[int] = []
        """The last tokens with text, `given` in number, and those after them."""
        self.given = 0
        self.kept = ""
        """Text that may become a stop."""
        self.stopped = False

    def add(self, token: int | None) -> str:
        """Return the text that a token adds, or, with None, the rest at the answer's end."""
        self.tokens += [] if token is None or token in self.shown else [token]
        before, now = (self.tokenizer.decode(tokens) for tokens in (self.tokens[: self.given], self.tokens))
        if len(now) > len(before) and (token in (None, *self.shown) or not now.endswith("\ufffd")):
            self.kept += now[len(before) :].rstrip("\ufffd")
            self.tokens, self.given = self.tokens[self.given :], len(self.tokens) - self.given
        self.kept += self.shown.get(token, "")
        ends = [self.kept.find(stop) for stop in self.stops if stop in self.kept]
        parts = [stop[:n] for stop in self.stops for n in range(1, min(len(stop), len(self.kept) + 1))]
        begun = [len(part) for part in parts if self.kept.endswith(part)]
        self.stopped = bool(ends)
        certain = min(ends) if ends else len(self.kept) - max(begun, default=0) * (token is not None)
        text, self.kept = self.kept[:certain], self.kept[certain:]
        return text
