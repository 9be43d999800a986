"""The model card of an exported network: what it is, what it was trained on, and the code that loads it."""

from pathlib import Path

from data.dataset import join_source, split_source
from interchange.folders import beyond_hf
from model.gpt import parameter_counts
from options.schema import Config, ModelConfig
from run.config_json import config_of_run
from run.folder import RunFolder
from run.record import place_of

LOAD = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER{trust})
tokenizer = AutoTokenizer.from_pretrained(FOLDER{trust})
text = tokenizer({prompt!r}, return_tensors="pt")  # with the token that starts a document
print(tokenizer.decode(model.generate(**text, max_new_tokens=50)[0]))
```"""
CHAT = """```python
from transformers import pipeline

chat = pipeline("text-generation", model=FOLDER{trust})
messages = [{{"role": "user", "content": {prompt!r}}}]
print(chat(messages, max_new_tokens=200)[0]["generated_text"][-1]["content"])
```

The template writes the token that starts a document; the tokenizer writes it before every other text. Encode a
conversation that the template rendered with `add_special_tokens=False`, or it starts with two of them.

The mask of `return_assistant_tokens_mask=True` is empty with this template. For training, `chat_template="training"`
gives the same tokens and the mask of what the assistant wrote."""


def card_of_run(folder: RunFolder, config: Config, step: int, license: str, chat: bool) -> str:
    """Return the model card of a run's checkpoint of `step`. `license` and `chat`: as for `model_card`."""
    tokens = place_of(folder.events.read(), step, config.batch.tokens_per_step).tokens
    converted = not config_of_run(folder)[0]["dataset"]
    val_bpb = folder.figures().get(step)
    return model_card(config, step, None if converted else tokens, val_bpb, license, chat)


def model_card(config: Config, step: int, tokens: int | None, val_bpb: float | None, license: str, chat: bool) -> str:
    """Return the model card of a network after `step` steps on `tokens` tokens; None: its text is not known. `chat`: it
    was trained on conversations. `license`: Hugging Face's name; empty: not stated."""
    model = config.model
    front_matter = ["library_name: transformers"]
    if license:
        front_matter.insert(0, f"license: {license}")
    header = "\n".join(["---", *front_matter, "---"])
    if chat:
        about = "A language model that answers the user of a conversation. It was fine-tuned on conversations."
        code = CHAT
    else:
        about = "A language model that continues text. It was pretrained and follows no instructions."
        code = LOAD
    trust = ", trust_remote_code=True" if beyond_hf(model) else ""
    code = code.format(prompt=_prompt(config, chat), trust=trust)
    facts = {
        "parameters": (
            f"{sum(parameter_counts(model).values()):,} "
            f"({model.depth} blocks of width {model.width}, {model.vocab_size:,} tokens)"
        ),
        "row": f"{config.batch.sequence_length:,} tokens",
        "training text": "not known" if tokens is None else text_name(config.data.source),
        "trained on": "not known" if tokens is None else f"{tokens:,} tokens, {step:,} steps",
        "bits per byte": "not measured at this step" if val_bpb is None else f"{val_bpb:.4f} of held-out text",
        "license": license or "not stated: ask whoever trained it, and see the training text's",
    }
    table = "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in facts.items())])
    return "\n\n".join([header, f"# {config.name}", about, table, code, requirements(model)]) + "\n"


def _prompt(config: Config, chat: bool) -> str:
    """Return a text for the code of a card: the run's own first prompt, if it has one."""
    own = [prompt for prompt in config.eval.prompts if prompt]
    if own:
        return own[0]
    if not chat:
        return ""
    return "What does sorted() do?" if config.data.source == "chat-stdlib" else "Hello!"


def text_name(source: str) -> str:
    """Return `data.source` for readers elsewhere: of a path on this machine, only the last name."""
    return join_source([(share, _short(name)) for share, name in split_source(source)])


def _short(name: str) -> str:
    is_address = "://" in name or name.startswith("hf:")
    return name if is_address else Path(name).name or "a folder"


def requirements(model: ModelConfig) -> str:
    """Return what a user needs to run a network. docs/chat.md has the versions that were tried."""
    if lacking := ", ".join(beyond_hf(model)):
        return (
            "It needs torch and transformers 4.57.6 or later, which run the code in this folder "
            f"(`trust_remote_code=True`). vLLM, llama.cpp and mlx-lm lack {lacking}."
        )
    return "It needs torch and transformers 5.0 or later (NanoChatForCausalLM). llama.cpp lacks this architecture."
