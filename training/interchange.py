"""Networks to and from other programs: transformers' NanoChatForCausalLM, and plain safetensors.

ours [inputs, outputs]                transformers' [outputs, inputs]
embed.table                           model.embed_tokens.weight
blocks.N.attention.query.kernel       model.layers.N.self_attn.q_proj.weight      and so key, value, out
blocks.N.mlp.up.kernel, down          model.layers.N.mlp.fc1.weight, fc2
lm_head.kernel                        lm_head.weight
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from safetensors import safe_open
from safetensors.numpy import save_file

from configs.schema import Config, ModelConfig, UserError
from data.tokenizer import TextTokenizer, load_tokenizer
from training.optimizer import path_name
from training.state import split_model

Arrays = dict[str, Float[np.ndarray, "..."]]
HF_TABLE = "model.embed_tokens.weight"  # tells transformers' names from ours

HF_NAMES = {
    r"embed\.table": HF_TABLE,
    r"lm_head\.kernel": "lm_head.weight",
    r"blocks\.(\d+)\.attention\.query\.kernel": r"model.layers.\1.self_attn.q_proj.weight",
    r"blocks\.(\d+)\.attention\.key\.kernel": r"model.layers.\1.self_attn.k_proj.weight",
    r"blocks\.(\d+)\.attention\.value\.kernel": r"model.layers.\1.self_attn.v_proj.weight",
    r"blocks\.(\d+)\.attention\.out\.kernel": r"model.layers.\1.self_attn.o_proj.weight",
    r"blocks\.(\d+)\.mlp\.up\.kernel": r"model.layers.\1.mlp.fc1.weight",
    r"blocks\.(\d+)\.mlp\.down\.kernel": r"model.layers.\1.mlp.fc2.weight",
}


def hf_name(name: str) -> str:
    """transformers' name of a parameter of ours; the parameter's own, if its class has none."""
    found = [re.sub(ours, theirs, name) for ours, theirs in HF_NAMES.items() if re.fullmatch(ours, name)]
    return found[0] if found else name


def turned(name: str, array: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """From ours to transformers', or back: a matrix is transposed, a table is not."""
    return np.ascontiguousarray(array.T) if name.endswith(".kernel") else array


def hf_config(config: Config, bos: int) -> dict[str, Any]:
    """transformers' config.json of a network."""
    model = config.model
    return {
        "architectures": ["NanoChatForCausalLM"],
        "model_type": "nanochat",
        "vocab_size": model.vocab_size,
        "hidden_size": model.width,
        "intermediate_size": 4 * model.width,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": config.batch.sequence_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
        "final_logit_softcapping": model.softcap,
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": bos,
        "eos_token_id": bos,  # a document ends where the next one starts
        "pad_token_id": None,  # else its row of the embedding would never learn
        "dtype": "float32",
    }


def beyond_hf(model: ModelConfig) -> list[str]:
    """The options in use that transformers' class has not."""
    windows = "S" in model.window_pattern[: max(model.depth - 1, 0)]
    features = ("value_embeddings", "resid_lambdas", "x0_lambdas", "smear", "backout")
    used = [name for name in features if getattr(model, name)]
    return [*used, *(["window_pattern"] if windows else []), *(["qk_scale"] if model.qk_scale != 1 else [])]


def write_hf(out: Path, params: dict, config: Config, tokenizer: TextTokenizer) -> None:
    """A folder for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`. UserError where the
    network has what NanoChatForCausalLM cannot express."""
    if beyond := beyond_hf(config.model):
        raise UserError(
            f"transformers' NanoChatForCausalLM has no {', '.join(f'model.{name}' for name in beyond)}, which this "
            "network uses; --format=safetensors writes it"
        )
    arrays = {hf_name(name): turned(name, array) for name, array in arrays_of(params).items()}
    bos = next(token for token, i in tokenizer.special_tokens.items() if i == tokenizer.bos)
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.bos, "pad_token_id": tokenizer.bos}
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": bos, "pad_token": bos}
    length = config.batch.sequence_length
    _write(
        out,
        arrays,
        tokenizer,
        {
            "config.json": hf_config(config, tokenizer.bos),
            "generation_config.json": ids,
            "tokenizer_config.json": {**tokens, "model_max_length": length, "clean_up_tokenization_spaces": False},
        },
    )


def write_safetensors(out: Path, params: dict, config: Config, tokenizer: TextTokenizer) -> None:
    """A folder with the arrays as they are, under their dotted names."""
    _write(out, arrays_of(params), tokenizer, {"tokensum.json": dataclasses.asdict(config.model)})


def _write(out: Path, arrays: Arrays, tokenizer: TextTokenizer, files: dict[str, dict]) -> None:
    out.mkdir(parents=True)
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2))
    (out / "tokenizer.json").write_text(tokenizer.json)
    save_file(arrays, out / "model.safetensors", metadata={"format": "pt"})


def arrays_of(params: dict) -> Arrays:
    """The parameters by their dotted names."""
    return {path_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def require_same_network(config: Config, tokenizer: TextTokenizer) -> None:
    """UserError where `config.init_from` holds another network than the options ask for, or another vocabulary."""
    folder = Path(config.init_from)
    shapes = {name: tuple(array.get_shape()) for name, array in _stored(folder).items()}
    if (folder / "tokenizer.json").exists():
        theirs, ours = (of.library.get_vocab() for of in (load_tokenizer(folder), tokenizer))
        if theirs != ours:
            raise UserError(
                f"--init_from={folder} holds another vocabulary than the data were made with; prepare the data with "
                f"--tokenizer={folder}, or give --data.tokenizer={folder} for raw text"
            )
    problems = _other_options(folder, config)
    leaves = jax.tree_util.tree_leaves_with_path(split_model(config.model, jnp.dtype(jnp.float32))[1])
    wanted = {path_name(path): leaf.shape for path, leaf in leaves}
    if HF_TABLE in shapes:
        wanted = {hf_name(name): shape[::-1] if name.endswith(".kernel") else shape for name, shape in wanted.items()}
    for name in sorted(wanted.keys() | shapes.keys()):
        if wanted.get(name) != shapes.get(name):
            problems.append(f"{name}: {shapes.get(name, 'missing')}, not {wanted.get(name, 'there')}")
    if problems:
        told = "\n  ".join(problems)
        raise UserError(f"--init_from={folder} is of another network than the options ask for:\n  {told}")


def read_params(config: Config, abstract: dict) -> dict:
    """The parameters in `config.init_from`, of a network that is the same, as `abstract`'s shapes and shardings say."""
    stored = _stored(Path(config.init_from))
    name_of = hf_name if HF_TABLE in stored else str

    def read(path: tuple, leaf: jax.ShapeDtypeStruct) -> Array:
        name = path_name(path)
        array = stored[name_of(name)][:]
        array = (turned(name, array) if HF_TABLE in stored else array).astype(np.float32)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: array[index])

    return jax.tree_util.tree_map_with_path(read, abstract)


def _stored(folder: Path) -> dict[str, Any]:
    """The arrays in a folder's files, by name, not yet read."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"--init_from={folder}: no *.safetensors there")
    try:
        opened = [safe_open(path, "numpy") for path in files]
        return {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors' own, of a file that is not whole
        raise UserError(f"--init_from={folder} cannot be read: {error}") from error


def _other_options(folder: Path, config: Config) -> list[str]:
    """What the folder's config says that no shape does, where the options differ."""
    if (folder / "tokensum.json").exists():
        told, asked = json.loads((folder / "tokensum.json").read_text()), dataclasses.asdict(config.model)
        free = ["dtype", "remat"]  # of speed
    elif (folder / "config.json").exists():
        told, asked = json.loads((folder / "config.json").read_text()), hf_config(config, 0)
        asked |= {f"model.{name}": "in use" for name in beyond_hf(config.model)}
        told |= {name: "not there" for name in asked if name.startswith("model.")}
        free = ["architectures", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "max_position_embeddings"]
    else:
        return []
    common = [name for name in asked if name in told and name not in free]
    return [f"{name}: {told[name]}, not {asked[name]}" for name in common if told[name] != asked[name]]
