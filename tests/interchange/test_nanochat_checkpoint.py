"""Test nanochat's own checkpoints: its logits, its tokens, and what is refused.

nanochat_logits.json has logits of nanochat's code at a commit of each generation, in float32 on a CPU, of the
parameters that `numbers` makes. With NANOCHAT_DIR, a clone of nanochat, the code computes them again."""

import json
import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiktoken
from flax import nnx

from data.conversation import messages_of, render
from data.packing import learned
from data.tokenizer import BOS, CHAT_TOKENS
from data.tokenizer_formats import SPLIT, find_tokenizer
from interchange.convert import main, read_network, tokenizer_in
from interchange.formats import turned
from interchange.nanochat import GENERATIONS, describe_network, nanochat_name
from model.gpt import parameter_shapes
from model.loss import softcap
from options.command_line import parse
from options.schema import MeshConfig, ModelConfig
from options.validation import resolved
from run.folder import RunFolder
from run.init_from import initial_state, require_moments, require_same_network
from system.errors import UserError
from tests.data.nanochat_conversations import conversations
from tests.helpers import arrays_of, sharded
from tests.interchange.nanochat_history import COMMITS, SIZES, nanochat_at, needs_nanochat
from training.build import build
from training.optimizer import peak_rates
from training.sharded import split_model

torch = pytest.importorskip("torch")

META = SIZES | {"window_pattern": "SSSL"}
TOKENS = np.random.default_rng(0).integers(0, 300, (2, 200), np.int32)
SAVED = Path(__file__).with_name("nanochat_logits.json")
MERGES = [b"th", b"the", b" q", b" qu", b"in"]
ENCODING = tiktoken.Encoding(
    "rustbpe",
    pat_str=SPLIT,
    mergeable_ranks={bytes([b]): b for b in range(256)} | {token: 256 + i for i, token in enumerate(MERGES)},
    special_tokens={name: 291 + i for i, name in enumerate((BOS, *CHAT_TOKENS))},
)


def numbers(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Return the same numbers for the same names and shapes."""
    made = {}
    for i, (name, shape) in enumerate(sorted(shapes.items())):
        waves = np.sin(0.731 * np.arange(np.prod(shape)) ** 2 + i).reshape(shape)
        size = 1.0 if name.startswith("transformer.wte") else 0.2  # our norms add 1e-6 to mean squares, its 1.2e-7
        made[name] = torch.tensor(size * waves + (len(shape) == 1), dtype=torch.float32)
    return made


def shapes_of(generation: str = "a825e63", rows: int = 320) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of nanochat's network. Its tables have rows for a multiple of 64 tokens."""
    shapes, model = {}, config_model(generation)
    for name, shape in parameter_shapes(model).items():
        shape = tuple(reversed(shape)) if name.endswith(".kernel") else tuple(shape)
        shapes[nanochat_name(name)] = (rows, *shape[1:]) if shape[0] == model.vocab_size else shape
    if generation == "9a88194":
        shapes = {name: shape for name, shape in shapes.items() if "ve_gate" not in name} | {"v0_lambdas": (4,)}
    return shapes


def write(folder: Path, tensors: dict | None = None, step: int = 7, **meta) -> Path:
    """Write a checkpoint as nanochat does, and its tokenizer two folders above."""
    folder.mkdir(parents=True, exist_ok=True)
    stage = {"max_seq_len": SIZES["sequence_len"]} if folder.parent.name == "base_checkpoints" else {}
    (folder / f"meta_{step:06d}.json").write_text(json.dumps({"step": step, "model_config": META} | stage | meta))
    torch.save(numbers(shapes_of()) if tensors is None else tensors, folder / f"model_{step:06d}.pt")
    home = folder.parent.parent / "tokenizer"
    home.mkdir(exist_ok=True)
    (home / "tokenizer.pkl").write_bytes(pickle.dumps(ENCODING))
    return folder


def sizes_of(generation: str) -> dict[str, Any]:
    """Return the sizes in a meta file. The first networks had no windows."""
    return SIZES if generation in ("3a5e0bc", "aa530cd") else META


def config_model(generation: str = "a825e63") -> ModelConfig:
    return describe_network({"model_config": sizes_of(generation)}, generation)[0]


def logits_of(folder: Path, cap: Any = None) -> np.ndarray:
    """Return our capped logits of the network in a folder."""
    _, config, params = read_network(folder, cap)
    graphdef, _ = split_model(config.model, jnp.dtype("float32"))
    logits = jax.jit(lambda params, tokens: softcap(nnx.merge(graphdef, params)(tokens)[0], config.model.softcap))
    return np.asarray(logits(params, TOKENS))


def cap_of(generation: str) -> str | None:
    """Return the commit to name for a generation whose arrays do not tell the cap."""
    return generation if generation in ("e85db6b", "aba30cb") else None


@pytest.mark.parametrize("generation", GENERATIONS)
def test_logits_are_those_of_nanochat_s_code(generation, tmp_path):
    folder = write(tmp_path / "base_checkpoints/d4", {}, step=3)  # an older one
    write(folder, numbers(shapes_of(generation)), model_config=sizes_of(generation))
    some = json.loads(SAVED.read_text())[generation]
    np.testing.assert_allclose(logits_of(folder, cap_of(generation))[:, ::33, ::50], some, rtol=0, atol=1e-4)
    assert np.std(some) > 0.5


@needs_nanochat
@pytest.mark.medium
@pytest.mark.parametrize("commit", COMMITS)
def test_a_checkpoint_of_nanochat_s_code_at_a_commit_gives_its_logits_and_its_tokens(commit, tmp_path):
    generation = next(name for name in reversed(GENERATIONS) if COMMITS.index(name) <= COMMITS.index(commit))
    base = tmp_path / "base"
    with nanochat_at(commit, tmp_path / "code") as theirs:
        known = theirs.gpt.GPTConfig.__dataclass_fields__
        sizes = {name: value for name, value in META.items() if name in known}
        network = theirs.gpt.GPT(theirs.gpt.GPTConfig(**sizes))
        torch.manual_seed(0)
        network.init_weights()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
            expected = network(torch.tensor(TOKENS, dtype=torch.long)).numpy()
        meta = {"step": 650, "val_loss": 1.0, "model_config": sizes}
        folder = base / "chatsft_checkpoints/d4"
        theirs.checkpoint_manager.save_checkpoint(str(folder), 650, network.state_dict(), None, meta)
        shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
        network.load_state_dict(numbers(shapes))
        with torch.no_grad():
            some = network(torch.tensor(TOKENS, dtype=torch.long)).numpy()[:, ::33, ::50]
        tokenizer = theirs.tokenizer.RustBPETokenizer(ENCODING, BOS)
        tokenizer.save(str(base / "tokenizer"))
        rendered = [tokenizer.render_conversation(one) for one in conversations(0, 12)]
    assert np.std(expected) > 0.5
    np.testing.assert_allclose(logits_of(folder, cap_of(generation)), expected, rtol=0, atol=1e-5)
    if commit == generation:
        assert shapes == shapes_of(generation, rows=300 if commit == "3a5e0bc" else 320)
    np.testing.assert_allclose(some, json.loads(SAVED.read_text())[generation], rtol=0, atol=1e-5)
    ours = find_tokenizer(tokenizer_in(folder))
    for (tokens, mask), conversation in zip(rendered, conversations(0, 12)):
        found = render(ours, messages_of(conversation))
        assert found == tokens and learned(np.array(found), ours.special_tokens).tolist() == [bool(x) for x in mask]


def test_parameters_are_read_back_exactly(tmp_path):
    model = config_model()
    params = jax.tree.map(
        lambda leaf: np.random.default_rng(leaf.size).standard_normal(leaf.shape, np.float32),
        sharded(model).abstract_params(),
    )
    stored = {nanochat_name(name): torch.tensor(turned(name, array)) for name, array in arrays_of(params).items()}
    stored["transformer.wte.weight"] = stored["transformer.wte.weight"].bfloat16()  # as on a GPU
    params["embed"]["table"] = stored["transformer.wte.weight"].float().numpy()
    folder = write(tmp_path / "base_checkpoints/d4", {f"_orig_mod.{name}": one for name, one in stored.items()})
    step, config, read = read_network(folder)
    assert step == 7 and config.model == model and config.batch.sequence_length == SIZES["sequence_len"]
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(read))
    del stored["smear_lambda"], stored["value_embeds.1.weight"]
    torch.save(stored, folder / "model_000007.pt")
    with pytest.raises(UserError, match=r"smear_lambda: missing, not \(1,\)\n  value_embeds.1.weight: missing"):
        read_network(folder)


def test_fine_tuning_follows_the_checkpoint_s_rates_and_step(tmp_path, monkeypatch):
    trained = {"embedding_lr": 0.5, "unembedding_lr": None, "matrix_lr": 0.03, "scalar_lr": 9.0}
    folder = write(tmp_path / "base_checkpoints/d4", user_config=trained, total_batch_size=2**20)
    monkeypatch.setattr(sys, "argv", ["convert", f"--source={folder}", f"--out={tmp_path}/run"])
    assert main() == 0
    config, _ = parse("", argv=["--config=configs/chat.py", f"--init_from={tmp_path}/run", "--model.dtype=float32"])
    network = replace(config_model(), dtype="float32")
    assert resolved(config).model == network and config.batch.tokens_per_step == 2**20
    wanted = {"embed": 0.5, "lm_head": 0.004, "value_embeds": 0.25, "matrices": 0.03, "resid_lambdas": 0.005}
    wanted |= {"x0_lambdas": 0.5, "scalars": 0.2}
    assert peak_rates(config.optimizer, 768) == pytest.approx({name: 0.8 * rate for name, rate in wanted.items()})
    assert config.optimizer.clip_norm == 1e9 and config.data.tokenizer == f"{tmp_path}/run/tokenizer"
    require_same_network(config, RunFolder(config.init_from))
    require_moments(config, RunFolder(config.init_from))  # zeros, as those of a new run
    assert initial_state(build(replace(config, mesh=MeshConfig(2, 2, 2)))).step == 0


def test_its_tokens_are_tiktoken_s(tmp_path):
    home = tokenizer_in(write(tmp_path / "base_checkpoints/d4"))
    assert home == tmp_path / "tokenizer"
    tokenizer, text = find_tokenizer(home), "the quick brown thing, in 1,234 quiet  quarters\n\n<|bos|> élan"
    assert tokenizer.encode([text])[0] == ENCODING.encode_ordinary(text) and not tokenizer.missing_chat_tokens
    assert tokenizer.bos == 291 and tokenizer.vocab_size == 300


class Harm:
    """A pickle of it calls a function when it is read."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def state(**changes) -> tiktoken.Encoding:
    """Return an encoding whose pickle has other parts."""
    encoding = tiktoken.Encoding.__new__(tiktoken.Encoding)
    parts = {"name": "rustbpe", "_pat_str": SPLIT, "_mergeable_ranks": ENCODING._mergeable_ranks}
    vars(encoding).update(parts | {"_special_tokens": ENCODING._special_tokens} | changes)
    return encoding


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (lambda path: Harm(os.system, f"touch {path}"), r"names posix.system, which no tokenizer needs"),
        (lambda path: state(_pat_str=Harm(open, path, "w")), r"names _?io.open, which"),
        (lambda path: state(_special_tokens={"a": Harm(eval, f"open({str(path)!r}, 'w')")}), "names builtins.eval"),
        (lambda path: Harm(tiktoken.get_encoding, "gpt2"), "names tiktoken.registry.get_encoding"),
        (lambda path: {"mergeable_ranks": {}}, "it is no tiktoken.Encoding"),
        (lambda path: state(_pat_str=None), "it is no tiktoken.Encoding"),
        (lambda path: state(_mergeable_ranks={"a": 1}), "its tokens are not bytes and numbers"),
    ],
)
def test_a_tokenizer_that_is_more_than_an_encoding_is_refused_and_nothing_is_called(tmp_path, pickled, message):
    (tmp_path / "tokenizer.pkl").write_bytes(pickle.dumps(pickled(tmp_path / "harm")))
    with pytest.raises(UserError, match=f"no readable tokenizer in tokenizer.pkl .*{message}"):
        find_tokenizer(tmp_path)
    assert not (tmp_path / "harm").exists()


def test_a_harmful_or_unknown_checkpoint_is_refused_by_name(tmp_path):
    folder = write(tmp_path / "base_checkpoints/d4")
    torch.save({"lm_head.weight": Harm(os.system, f"touch {tmp_path / 'harm'}")}, folder / "model_000007.pt")
    with pytest.raises(UserError, match=r"model_000007.pt cannot be read as nanochat's: Weights only load failed"):
        read_network(folder)
    assert not (tmp_path / "harm").exists()
    (folder / "model_000007.pt").write_bytes(b"half")
    with pytest.raises(UserError, match=r"model_000007.pt cannot be read as nanochat's"):
        read_network(folder)
    for changed, message in (
        ({"n_expert": 8}, "n_expert"),
        ({"n_head": None}, "TypeErr"),
        ({"n_embd": 66}, "head_dim"),
    ):
        write(folder, {}, model_config=META | changed)
        with pytest.raises(UserError, match=f"meta file of .* describes no network of ours: .*{message}"):
            read_network(folder)
    (folder / "meta_000007.json").unlink()
    with pytest.raises(UserError, match="describes no network of ours: FileNotFoundError"):
        read_network(folder)
