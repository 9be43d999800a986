"""Networks in folders for other programs, as safetensors, written one shard at a time.

transformers reads them as its NanoChatForCausalLM if that class has all that a network uses, else with a modeling file
of our own, interchange/modeling_tokensum.py (`trust_remote_code`). Plain safetensors have our own names and shapes.

ours                               NanoChatForCausalLM                             the modeling file
embed.table                        model.embed_tokens.weight                       embed.weight
blocks.N.attention.query.kernel    model.layers.N.self_attn.q_proj.weight          blocks.N.attention.query.weight
blocks.N.mlp.up.kernel             model.layers.N.mlp.fc1.weight                   blocks.N.mlp.up.weight
resid_lambdas.values               -                                               resid_lambdas

A kernel is [inputs, outputs] here, and [outputs, inputs] there.
"""

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Set
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from configs.schema import SMEAR_CHANNELS, VALUE_GATE_CHANNELS, Config, ModelConfig, UserError, roles
from data.tokenizer import CHAT_TOKENS, TextTokenizer
from model.attention import has_value_embedding, window_of

Arrays = dict[str, Float[np.ndarray, "..."]]
MODELING = Path(__file__).with_name("modeling_tokensum.py")
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
HF_TABLE, OWN_TABLE = "model.embed_tokens.weight", "embed.weight"  # these names identify each
HF_NAMES = {
    "embed.table": HF_TABLE,
    "lm_head.kernel": "lm_head.weight",
    "blocks.": "model.layers.",
    "attention.query.kernel": "self_attn.q_proj.weight",
    "attention.key.kernel": "self_attn.k_proj.weight",
    "attention.value.kernel": "self_attn.v_proj.weight",
    "attention.out.kernel": "self_attn.o_proj.weight",
    "mlp.up.kernel": "mlp.fc1.weight",
    "mlp.down.kernel": "mlp.fc2.weight",
}
"""Parts of our parameters' names, and of NanoChatForCausalLM's."""
IN_HF = {"depth", "width", "heads", "kv_heads", "head_dim", "vocab_size", "softcap", "rotary_base", "short_window"}
"""The options that `hf_config` expresses."""
REMOTE = {"qk_scale", "window_pattern", "value_embeddings", "resid_lambdas", "x0_lambdas", "smear", "backout"}
"""The options that only the modeling file has, not transformers' class."""


def hf_name(name: str) -> str:
    """Return transformers' name of a parameter of ours."""
    for ours, theirs in HF_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def own_name(name: str) -> str:
    """Return the modeling file's name of a parameter of ours."""
    stem, _, kind = name.rpartition(".")
    return stem if kind == "values" else f"{stem}.weight"


def spelling(stored: Collection[str]) -> tuple[Callable[[str], str], bool]:
    """Return a folder's names of our parameters, and whether its matrices are [outputs, inputs], as in torch."""
    if HF_TABLE in stored:
        return hf_name, True
    return (own_name, True) if OWN_TABLE in stored else (str, False)


def turned(name: str, array: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Turn an array from ours to transformers', or back: a matrix is transposed, a table is not."""
    return np.ascontiguousarray(array.T) if name.endswith(".kernel") else array


def _sizes(config: Config) -> dict[str, Any]:
    """Return what both kinds of config.json have."""
    model = config.model
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.width,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": config.batch.sequence_length,
        "tie_word_embeddings": False,
    }


def hf_config(config: Config) -> dict[str, Any]:
    """Return NanoChatForCausalLM's config.json of a network, without its special tokens."""
    return _sizes(config) | {
        "architectures": ["NanoChatForCausalLM"],
        "model_type": "nanochat",
        "intermediate_size": 4 * config.model.width,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.model.rotary_base},
        "final_logit_softcapping": config.model.softcap,
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


def model_of_hf(theirs: dict[str, Any]) -> ModelConfig:
    """Return the network of NanoChatForCausalLM's config.json. LookupError if it lacks a name."""
    heads, width = theirs["num_attention_heads"], theirs["hidden_size"]
    return ModelConfig(
        depth=theirs["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=theirs.get("num_key_value_heads") or heads,
        head_dim=theirs.get("head_dim") or width // heads,
        vocab_size=theirs["vocab_size"],
        softcap=theirs.get("final_logit_softcapping", 15.0),
        rotary_base=(theirs.get("rope_parameters") or theirs).get("rope_theta", 10_000.0),
    )


def own_config(config: Config) -> dict[str, Any]:
    """Return the modeling file's config.json of a network with any options, without its special tokens."""
    model, layers = config.model, range(config.model.depth)
    same = ("softcap", "rotary_base", "qk_scale", "resid_lambdas", "x0_lambdas", "smear", "backout")
    return _sizes(config) | {
        "architectures": ["TokensumForCausalLM"],
        "model_type": "tokensum",
        "auto_map": {
            "AutoConfig": f"{MODELING.stem}.TokensumConfig",
            "AutoModelForCausalLM": f"{MODELING.stem}.TokensumForCausalLM",
        },
        **{name: getattr(model, name) for name in same},
        "windows": [window_of(model, layer) for layer in layers],
        "value_embeddings": [layer for layer in layers if has_value_embedding(model, layer)],
        "smear_channels": SMEAR_CHANNELS,
        "value_gate_channels": VALUE_GATE_CHANNELS,
        "options": function_options(model),  # as interchange/init_from.py reads them
    }


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
    card: Callable[[bool, bool], str] | None = None,
) -> None:
    """Write a folder for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`, of arrays by their
    dotted names, in `dtype`. A network that transformers' own class cannot express comes with the code that reads it,
    and needs `trust_remote_code=True`. `card` takes whether it does, and whether it was trained on conversations, and
    returns README.md. Raise UserError if that code lacks an option, too."""
    if unknown := beyond_hf(config.model, IN_HF | REMOTE):
        raise UserError(
            f"{MODELING.name} has no {', '.join(f'model.{name}' for name in unknown)}, which this network uses; "
            "--format=safetensors writes it"
        )
    own = bool(beyond_hf(config.model))
    named, described = (own_name, own_config) if own else (hf_name, hf_config)
    bos = next(token for token, i in tokenizer.special_tokens.items() if i == tokenizer.bos)
    chat = converses(config, tokenizer)
    # A document ends where the next one starts. With a pad token the network's row of it would never learn.
    eos = "<|assistant_end|>" if chat else bos
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.special_tokens[eos]}
    ends = [ids["eos_token_id"], tokenizer.bos] if chat else tokenizer.bos
    contents = {
        "config.json": described(config) | ids | {"pad_token_id": None, "dtype": dtype},
        "generation_config.json": ids | {"eos_token_id": ends, "pad_token_id": tokenizer.bos},
        "tokenizer_config.json": {
            **{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos, "pad_token": bos},
            **{"model_max_length": config.batch.sequence_length, "clean_up_tokenization_spaces": False},
            **({"extra_special_tokens": [*CHAT_TOKENS]} if chat else {}),
        },
    }
    files = {name: json.dumps(content, indent=2) for name, content in contents.items()}
    files |= {"tokenizer.json": tokenizer.json_with_bos} | ({MODELING.name: MODELING.read_text()} if own else {})
    files |= {CHAT_TEMPLATE.name: CHAT_TEMPLATE.read_text()} if chat else {}
    files |= {"README.md": card(own, chat)} if card else {}
    written = (
        {named(name): turned(name, array).astype(dtype, copy=False) for name, array in arrays.items()}
        for arrays in shards
    )
    write_folder(out, written, files)


def write_safetensors(out: Path, shards: Iterable[Arrays], config: Config, tokenizer: TextTokenizer) -> None:
    """Write a folder with the unchanged arrays under their dotted names."""
    facts = {"model_type": "tokensum", "max_position_embeddings": config.batch.sequence_length}
    content = json.dumps(facts | {"options": function_options(config.model)}, indent=2)
    write_folder(out, shards, {"config.json": content, "tokenizer.json": tokenizer.json})


def function_options(model: ModelConfig) -> dict[str, Any]:
    """Return the options that determine a network's function."""
    return {name: getattr(model, name) for name, meanings in roles(ModelConfig).items() if not meanings}


def write_folder(out: Path, shards: Iterable[Arrays], files: dict[str, str]) -> None:
    """Write the new folder `out` atomically, one file per shard. Raise UserError if that fails."""
    partial = out.with_name(f"{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # from an export that was killed
        partial.mkdir(parents=True)
        for name, content in files.items():
            (partial / name).write_text(content)
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


def stored_arrays(folder: Path) -> dict[str, Any]:
    """Return the arrays in a folder's files, by name, not yet read. Raise UserError if they are missing or
    incomplete."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} has no network: no *.safetensors there")
    try:
        opened = [safe_open(path, "numpy") for path in files]
        return {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors' own, for an incomplete file
        raise UserError(f"the network in {folder} cannot be read: {error}") from error
