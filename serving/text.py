"""An answer's tokens as text, while they come."""

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from data.tokenizer import CHAT_TOKENS, TextTokenizer

SHOWN = dict(zip(CHAT_TOKENS[4:], ("`", "`", " = `", "` ")))  # a call of the calculator reads `2+2` = `4`


class AnswerText:
    """Turns tokens into the certain part of an answer's text: complete characters, and nothing that may become one
    of `stops`, before which the text ends."""

    def __init__(self, tokenizer: TextTokenizer, stops: Sequence[str] = ()):
        self.library, self.stops = tokenizer.library, [stop for stop in stops if stop]
        self.shown = {tokenizer.special_tokens[name]: text for name, text in SHOWN.items()}
        self.decoder = DecodeStream(skip_special_tokens=True)
        self.kept = ""
        """Text that may become a stop."""
        self.stopped = False

    def add(self, token: int) -> str:
        """Return the text that a token adds."""
        self.kept += self.shown.get(token) or self.decoder.step(self.library, token) or ""
        ends = [self.kept.find(stop) for stop in self.stops if stop in self.kept]
        begun = [
            n
            for stop in self.stops
            for n in range(1, min(len(stop), len(self.kept) + 1))
            if self.kept.endswith(stop[:n])
        ]
        self.stopped = bool(ends)
        certain = min(ends) if ends else len(self.kept) - max(begun, default=0)
        text, self.kept = self.kept[:certain], self.kept[certain:]
        return text
