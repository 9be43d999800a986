"""Draw conversations. nanochat_conversations.json has nanochat's tokens and masks of some, written by this file of
17a1ee6."""

import random
from collections.abc import Iterator
from pathlib import Path

from data.tokenizer import BOS, CHAT_TOKENS, TextTokenizer
from data.tokenizer_formats import SPLIT, convert_tiktoken

RESULTS = Path(__file__).with_name("nanochat_conversations.json")
MERGES = [b"th", b"the", b" t", b" the", b"er", b"an", b"and", b" a", b"\n\n", b"12", b"<|", b"|>", b"\xc3\xa9"]
RANKS = {bytes([i]): i for i in range(256)} | {token: 256 + i for i, token in enumerate(MERGES)}
SPECIAL = {token: len(RANKS) + i for i, token in enumerate((BOS, *CHAT_TOKENS))}
WORDS = ["the", " the", " and", " other", "12", "3", "\n\n", " é", "日本", "🙂", "  ", "<|assistant_end|>", "<|bos|>"]


def our_tokenizer() -> TextTokenizer:
    return convert_tiktoken(RANKS, SPLIT, SPECIAL)


def conversations(seed: int, count: int) -> Iterator[dict]:
    """Yield conversations of up to four turns. Some have system messages, parts, or an unanswered last message."""
    generator = random.Random(seed)
    text = lambda: "".join(generator.choices(WORDS, k=generator.randint(1, 9))) + "."
    for _ in range(count):
        messages = [{"role": "system", "content": text()}] if generator.random() < 0.3 else []
        for _ in range(generator.randint(1, 4)):
            kinds = generator.choices(["text", "python", "python_output"], k=generator.randint(1, 5))
            parts = [{"type": kind, "text": text()} for kind in kinds]
            answer = parts if generator.random() < 0.4 else text()
            messages += [{"role": "user", "content": text()}, {"role": "assistant", "content": answer}]
        yield {"messages": messages[: len(messages) - (generator.random() < 0.2)]}
