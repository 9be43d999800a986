"""Write networks into folders for other programs, as safetensors, one shard at a time.

transformers reads them as its NanoChatForCausalLM if that class has all that a network uses, else with a modeling file
of our own, interchange/modeling_tokensum.py (`trust_remote_code`). Plain safetensors have our own names and shapes.
"""

import json
import re
import shutil
from collections.abc import Iterable, Set
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import save_file

from data.tokenizer import CHAT_TOKENS, TextTokenizer
from data.tokenizer_formats import bos_template
from interchange.formats import MODELING, Arrays, hf_config, hf_name, own_config, own_name, turned
from options.schema import Config, ModelConfig
from run.init_from import function_options
from system.errors import UserError

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
TRAINING_TEMPLATE = "additional_chat_templates/training.jinja"  # transformers: chat_template="training"
IN_HF = {"depth", "width", "heads", "kv_heads", "head_dim", "vocab_size", "softcap", "rotary_base", "short_window"}
"""The options that `hf_config` expresses."""
REMOTE = {"qk_scale", "window_pattern", "resid_lambdas", "x0_lambdas", "smear", "backout"}
REMOTE |= {"value_embeddings", "value_embedding_every", "value_gate_channels", "value_gate_limit"}
"""The options that only the modeling file has, not transformers' class."""


def beyond_hf(model: ModelConfig, known: Set[str] = frozenset(IN_HF)) -> list[str]:
    """Return the options in use that change the network, and that transformers' class lacks, or that are not
    `known`."""
    change = function_options(model).keys() - known
    if "S" not in model.window_pattern[: max(model.depth - 1, 0)]:  # the last block has no window
        change.discard("window_pattern")
    return [f.name for f in fields(model) if f.name in change and getattr(model, f.name) != f.default]


def converses(config: Config, tokenizer: TextTokenizer) -> bool:
    """Return whether a run was trained on conversations. Their packing says so: a tokenizer has their tokens, and a
    base network rows of them, before any is learned."""
    return config.data.packing == "whole" and not tokenizer.missing_chat_tokens


def write_hf(
    out: Path,
    shards: Iterable[Arrays],
    config: Config,
    tokenizer: TextTokenizer,
    dtype: str = "float32",
    card: str = "",
) -> None:
    """Write a folder for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`, of arrays by their
    dotted names, in `dtype`. A network that transformers' own class cannot express comes with the code that reads it,
    and needs `trust_remote_code=True`. `card`: the text of README.md, if any. Raise UserError if that code lacks an
    option, too."""
    if unknown := beyond_hf(config.model, IN_HF | REMOTE):
        raise UserError(
            f"{MODELING.name} has no {', '.join(f'model.{name}' for name in unknown)}, which this network uses; "
            "--format=safetensors writes it"
        )
    own = bool(beyond_hf(config.model))
    named, described = (own_name, own_config) if own else (hf_name, hf_config)
    chat = converses(config, tokenizer)
    bos = next(token for token, i in tokenizer.special_tokens.items() if i == tokenizer.bos)
    # A document ends where the next one starts. With a pad token the network's row of it would never learn.
    eos = "<|assistant_end|>" if chat else bos
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.special_tokens[eos]}
    ends = [ids["eos_token_id"], tokenizer.bos] if chat else tokenizer.bos
    contents = {
        "config.json": described(config) | ids | {"pad_token_id": None, "dtype": dtype},
        "generation_config.json": ids | {"eos_token_id": ends, "pad_token_id": tokenizer.bos},
        "tokenizer_config.json": tokenizer_config(bos, eos, config.batch.sequence_length, chat),
    }
    files = {name: json.dumps(content, indent=2) for name, content in contents.items()}
    files["tokenizer.json"] = json_with_bos(tokenizer)
    if own:
        files[MODELING.name] = MODELING.read_text(encoding="utf-8")
    if chat:
        template = CHAT_TEMPLATE.read_text(encoding="utf-8")
        files[CHAT_TEMPLATE.name] = template
        files[TRAINING_TEMPLATE] = re.sub(r"{#-( (?:end)?generation )-#}", r"{%-\1-%}", template)
    if card:
        files["README.md"] = card
    written = (
        {named(name): turned(name, array).astype(dtype, copy=False) for name, array in arrays.items()}
        for arrays in shards
    )
    write_folder(out, written, files)


def tokenizer_config(bos: str, eos: str, length: int, chat: bool) -> dict[str, Any]:
    """Return tokenizer_config.json for transformers 4 and 5. `length`: tokens of a row. `chat`: the network was trained
    on conversations."""
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": bos,
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",  # a batch of prompts then continues as each alone
        "model_input_names": ["input_ids", "attention_mask"],  # transformers 4 would add token_type_ids
    }
    if chat:
        # transformers 4 wants a dict as extra_special_tokens; both versions read this list.
        content["additional_special_tokens"] = [*CHAT_TOKENS]
    return content


def json_with_bos(tokenizer: TextTokenizer) -> str:
    """Return the tokenizer.json for other programs: it writes the BOS before a text, as training does.
    `find_tokenizer` undoes it."""
    if tokenizer.library.encode("").ids[:1] == [tokenizer.bos]:
        return tokenizer.json
    facts, template = json.loads(tokenizer.json), json.loads(bos_template(tokenizer))
    own = facts.get("post_processor")
    facts["post_processor"] = {"type": "Sequence", "processors": [own, template]} if own else template
    return json.dumps(facts, ensure_ascii=False)


def write_safetensors(out: Path, shards: Iterable[Arrays], config: Config, tokenizer: TextTokenizer) -> None:
    """Write a folder with the unchanged arrays under their dotted names."""
    facts = {"model_type": "tokensum", "max_position_embeddings": config.batch.sequence_length}
    content = json.dumps(facts | {"options": function_options(config.model)}, indent=2)
    write_folder(out, shards, {"config.json": content, "tokenizer.json": tokenizer.json})


def write_folder(out: Path, shards: Iterable[Arrays], files: dict[str, str]) -> None:
    """Write the new folder `out` atomically, one file per shard. Raise UserError if that fails."""
    partial = out.with_name(f"{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # from an export that was killed
        partial.mkdir(parents=True)
        for name, content in files.items():
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_text(content, encoding="utf-8")
        _write_shards(partial, shards)
        partial.rename(out)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--out={out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_shards(folder: Path, shards: Iterable[Arrays]) -> None:
    """Write model.safetensors, or several with their index, named as transformers does."""
    written: list[list[str]] = []
    size = 0
    for arrays in shards:
        path = folder / f"{len(written)}.safetensors"
        save_file(arrays, path, metadata={"format": "pt"})
        shutil.copymode(folder / "tokenizer.json", path)  # others may read it; this library would allow nobody
        written.append(list(arrays))
        size += sum(array.nbytes for array in arrays.values())
        del arrays  # free it before the next one is read
    count = len(written)
    if count == 1:
        (folder / "0.safetensors").rename(folder / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for i, name in enumerate(names):
        (folder / f"{i}.safetensors").rename(folder / name)
    weights = {array: name for name, arrays in zip(names, written) for array in arrays}
    index = {"metadata": {"total_size": size}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
