"""Test networks on the Hugging Face hub, in both directions: huggingface-hub's own client, and a small server for the
part of the hub that it asks here."""

import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_hub import constants

import export
from interchange import convert
from interchange.folders import write_hf
from interchange.hub import download, needed
from options.schema import BatchConfig, Config
from options.validation import resolved
from run.network import open_network
from system.errors import StorageLost, UserError
from tests.data.prepare.hub import ask, serving
from tests.helpers import arrays_of
from tests.interchange.hub import CUT, TOKEN, ModelHub
from tests.interchange.networks import network
from tests.run.written import TOKENIZER, write_run
from training.mesh import make_mesh
from training.state import TrainState

REPOSITORY = "owner/a-network"


@pytest.fixture(scope="module")
def endpoint():
    with serving(ModelHub) as url:
        yield url


@pytest.fixture(autouse=True)
def hub(endpoint, tmp_path, monkeypatch):
    """Point the client at an empty hub, with an empty cache, and give it a token."""
    ask(endpoint, monkeypatch, tmp_path / "cache")
    monkeypatch.setattr("system.files.RETRY_SECONDS", 0)
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    ModelHub.clear()


def run_of(folder: Path) -> dict:
    """Write a run, and return its parameters."""
    config, params = network()
    config = resolved(replace(config, run_dir=str(folder), batch=BatchConfig(sequence_length=64)))
    write_run(folder, config, TrainState(jnp.int32(1), jax.tree.map(jnp.asarray, params), (), jnp.int32(0)))
    return params


def call(program, monkeypatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", [program.__name__, *options])
    return program.main()


def test_what_is_pushed_comes_back_as_a_run_with_the_same_parameters(tmp_path, monkeypatch, capfd):
    params = run_of(tmp_path / "run")
    assert call(export, monkeypatch, f"--run_dir={tmp_path}/run", f"--push={REPOSITORY}") == 0
    files = ModelHub.branches[REPOSITORY]["main"]
    assert ModelHub.private == {REPOSITORY: True} and b"# one" in files["README.md"]
    assert {"config.json", "tokenizer.json", "model.safetensors", ".gitattributes"} <= files.keys()
    assert call(convert, monkeypatch, f"--source=hf:{REPOSITORY}", f"--out={tmp_path}/back") == 0
    assert not {"README.md", "tokenizer_config.json"} & set(ModelHub.asked)
    back = open_network(tmp_path / "back", make_mesh(Config(name="x").mesh, jax.local_devices()[:1]))
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(back.params))
    said = capfd.readouterr()
    assert f"parameters of hf:{REPOSITORY} are the run" in said.out and TOKEN not in said.out + said.err


def test_nothing_is_overwritten_unasked(tmp_path, monkeypatch):
    run_of(tmp_path / "run")
    push = lambda *options: call(export, monkeypatch, f"--run_dir={tmp_path}/run", f"--push={REPOSITORY}", *options)
    theirs = {".gitattributes": b"", "model-00001-of-00002.safetensors": b"theirs"}
    branches = ModelHub.branches[REPOSITORY] = {"main": dict(theirs)}
    with pytest.raises(UserError, match=r"has 1 files at main \(model-.*\): give --revision=BRANCH .*--overwrite"):
        push()
    assert push("--revision=second") == 0
    assert branches["main"] == theirs and "model-00001-of-00002.safetensors" not in branches["second"]
    with pytest.raises(UserError, match=r"has \d+ files at second"):
        push("--revision=second")
    assert push("--overwrite") == 0  # the old shards go, which a reader would load next to the new ones
    assert branches["main"] == branches["second"]
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="needs a token that may write: set HF_TOKEN"):
        push("--overwrite")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give a new folder as --out, or a repository of the hub as --push"),
        (["--out=new", "--revision=a"], "--revision and --overwrite need --push"),
        ([f"--push={REPOSITORY}", "--format=safetensors"], "--push and --dtype need --format=hf"),
    ],
)
def test_options_without_a_destination_are_refused(options, message, monkeypatch):
    with pytest.raises(UserError, match=message):
        call(export, monkeypatch, "--run_dir=none", *options)


def test_only_the_newest_checkpoint_s_files_are_needed():
    own = ["README.md", "meta_000009.json", "model_000009.pt", "meta_000010.json", "model_000010.pt", "token_bytes.pt"]
    own += ["optim_000010_rank0.pt", "tokenizer.pkl", "tokenizer/tokenizer.pkl"]
    assert needed(own) == ["meta_000010.json", "model_000010.pt", "tokenizer.pkl", "tokenizer/tokenizer.pkl"]
    theirs = ["config.json", "model.safetensors", "pytorch_model.bin", "onnx/model.onnx", "chat_template.jinja"]
    assert needed([*theirs, "tokenizer.json"]) == ["chat_template.jinja", "config.json", *theirs[1:2], "tokenizer.json"]


def test_a_download_that_is_cut_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CUT)  # the client keeps complete chunks, of 10 MB
    config, params = network()
    write_hf(tmp_path / "out", [arrays_of(params)], config, TOKENIZER)
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    ModelHub.branches[REPOSITORY] = {"main": {}, "v1": files}
    ModelHub.cut.add("model.safetensors")
    folder = download(f"hf:{REPOSITORY}@v1")
    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert ModelHub.ranges == [f"bytes={CUT}-"]
    ModelHub.asked.clear()
    assert download(f"hf:{REPOSITORY}@v1") == folder and ModelHub.asked == []


def test_offline_the_cache_serves_and_nothing_is_asked(monkeypatch):
    ModelHub.branches[REPOSITORY] = {"main": {"config.json": b"{}", "model.safetensors": b"x"}}
    folder = download(f"hf:{REPOSITORY}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert download(f"hf:{REPOSITORY}") == folder
    with pytest.raises(UserError, match="hf:owner/other: the hub refuses this"):
        download("hf:owner/other")


def test_mistakes_are_named_at_once_and_the_token_is_in_no_message(monkeypatch):
    ModelHub.branches[REPOSITORY] = {"main": {"README.md": b""}}
    with pytest.raises(UserError, match="holds no network at its top"):
        download(f"hf:{REPOSITORY}")
    for address in ("hf:owner/missing", f"hf:{REPOSITORY}@v9"):
        with pytest.raises(
            UserError, match=r"has no such repository or revision, .* set HF_TOKEN or run hf auth login"
        ):
            download(address)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="has no such repository or revision"):
        download("hf:owner/missing")  # the hub's status is 401 then
    with pytest.raises(UserError, match="the hub refuses this"):
        download("hf:no name at all")
    monkeypatch.setenv("HF_TOKEN", "hf_sec\x01ret")
    with pytest.raises(UserError, match="has a letter that no token has") as mistake:
        download(f"hf:{REPOSITORY}")
    assert "hf_" not in str(mistake.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StorageLost) as lost:
        download(f"hf:{REPOSITORY}")
    assert TOKEN not in str(lost.value)
