"""The model card (README.md) of an exported network."""

from configs.schema import Config
from model.shapes import kinds

LOAD = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER{trust})
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
text = tokenizer("Once upon a time", return_tensors="pt")  # with the token that starts a document
print(tokenizer.decode(model.generate(**text, max_new_tokens=50)[0]))
```"""
CHAT = """```python
from transformers import pipeline

chat = pipeline("text-generation", model=FOLDER{trust})
messages = [{{"role": "user", "content": "What does sorted() do?"}}]
print(chat(messages, max_new_tokens=200)[0]["generated_text"][-1]["content"])
```"""


def model_card(
    config: Config, step: int, tokens: int, val_bpb: float | None, license: str, remote: bool, chat: bool
) -> str:
    """Return the model card of a network after `step` steps on `tokens` tokens. `remote`: its code is in its folder.
    `chat`: it was trained on conversations.
    `license`: Hugging Face's name; empty: not stated."""
    model, parameters = config.model, sum(p.size * count for p, count in kinds(config.model))
    bits = "not measured at this step" if val_bpb is None else f"{val_bpb:.4f} of held-out text"
    trust = ", trust_remote_code=True" if remote else ""
    rows = {
        "parameters": f"{parameters:,} ({model.depth} blocks of width {model.width}, {model.vocab_size:,} tokens)",
        "row": f"{config.batch.sequence_length:,} tokens",
        "training text": config.data.source,
        "trained on": f"{tokens:,} tokens, {step:,} steps",
        "bits per byte": bits,
        "license": license or "not stated: ask whoever trained it, and see the training text's",
    }
    header = f"---\n{f'license: {license}' + chr(10) if license else ''}library_name: transformers\n---\n"
    table = "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())])
    if chat:
        about, load = "answers the user of a conversation. It was fine-tuned on conversations.", CHAT
    else:
        about, load = "continues text. It was pretrained and follows no instructions.", LOAD
    return f"{header}\n# {config.name}\n\nA language model that {about}\n\n{table}\n\n{load.format(trust=trust)}\n"
