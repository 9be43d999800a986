"""Test what configs/chat.py takes from the network that it fine-tunes."""

from dataclasses import replace

import pytest

from data.prepare.selection import train_tokenizer
from data.tokenizer_formats import SPLIT, convert_tiktoken
from interchange.convert import as_config, batch_of_rows
from options.command_line import parse
from options.files import load_config
from options.schema import BatchConfig, with_options
from run.config_json import write_config_json
from system.errors import UserError
from tests.helpers import tiny_config
from training.optimizer import peak_rates

PAIRS = {pair: 256 + i for i, pair in enumerate((b"to", b"be", b"or", b"no"))}
OLD = convert_tiktoken({bytes([byte]): byte for byte in range(256)} | PAIRS, SPLIT, {"<|bos|>": 260})
NEW = train_tokenizer(["to be or not to be " * 20], 272)
MUON = {"optimizer.matrices.kind": "muon", "optimizer.muon.peak_rate": 0.03, "optimizer.rate_factor": 0.5}
BASE = with_options(tiny_config(qk_scale=1.2, loss_chunks=2), MUON)


def chat(*words):
    return parse("", argv=["--config=configs/chat.py", *words])[0]


@pytest.fixture
def base(tmp_path, monkeypatch):
    """Return a run's folder with a config and a tokenizer, which is all that configs/chat.py reads."""
    monkeypatch.setenv("TOKENSUM_CACHE", str(tmp_path / "cache"))
    write_config_json(tmp_path / "run/config.json", BASE, "", [])
    NEW.save(tmp_path / "run/tokenizer")
    return tmp_path / "run"


def test_it_copies_a_run_except_the_recipe_and_given_options(base):
    config, recipe = chat(f"--init_from={base}"), load_config("configs/chat.py")[0]
    assert BASE.model.loss_chunks == 2  # it suits the base's machine
    suits = {"dtype": "auto", "loss_chunks": 1}
    assert config.model == replace(BASE.model, **suits, short_window=config.model.short_window)
    assert config.batch == replace(BASE.batch, rows_per_device="auto")
    assert config.data.tokenizer == str(base / "tokenizer")
    tuned = config.optimizer
    assert tuned.embed == BASE.optimizer.embed and tuned.matrices.kind == "muon" and tuned.rate_factor == 0.8 * 0.5
    assert config.init_optimizer and not chat(f"--init_from={base}", "--init_optimizer=False").init_optimizer
    assert tuned.schedule == recipe.optimizer.schedule
    assert tuned.muon == replace(recipe.optimizer.muon, peak_rate=0.03)
    given = ("--batch.sequence_length=8", "--optimizer.rate_factor=0.1", "--optimizer.embed.peak_rate=0.7")
    config = chat(f"--init_from={base}", *given)
    assert config.batch.sequence_length == 8 and config.optimizer.embed.peak_rate == 0.7
    assert config.optimizer.rate_factor == 0.1 and config.batch.tokens_per_step == BASE.batch.tokens_per_step


def test_rates_are_0_8_of_those_before_nanochat_s_factor_for_a_step_of_2_to_20_tokens(base):
    """nanochat's chat_sft inherits embedding_lr, unembedding_lr and matrix_lr as base_train was given them, and its
    scalar_lr is its own."""
    words = ("--config=configs/nanochat.py", "--model.depth=20", "--optimizer.x0_lambdas.peak_rate=0.3")
    pretraining, _ = parse("", argv=[*words])
    write_config_json(base / "config.json", pretraining, "", [])
    assert pretraining.batch.tokens_per_step == 2**20 and pretraining.optimizer.embed.peak_rate == 0.3 * 2**0.5
    config = chat(f"--init_from={base}")
    assert config.batch.tokens_per_step == 2**20
    wanted = {"embed": 0.3, "lm_head": 0.008, "value_embeds": 0.15, "matrices": 0.02, "resid_lambdas": 0.005}
    wanted |= {"x0_lambdas": 0.5, "scalars": 0.2}
    assert peak_rates(config.optimizer, 768) == pytest.approx({group: 0.8 * rate for group, rate in wanted.items()})


def test_after_a_converted_network_of_unknown_rates_the_recipe_s_own_apply(base):
    converted = as_config(BASE.model, batch_of_rows(16, BatchConfig.tokens_per_step), True)
    write_config_json(base / "config.json", converted, "", [])
    config, recipe = chat(f"--init_from={base}"), load_config("configs/chat.py")[0]
    assert (config.model.width, config.model.qk_scale, config.batch.sequence_length) == (32, 1.2, 16)
    assert config.batch.tokens_per_step == recipe.batch.tokens_per_step and config.optimizer == recipe.optimizer


def test_a_base_without_the_tokens_of_conversations_is_refused_with_what_to_do(base):
    OLD.save(base / "tokenizer")
    with pytest.raises(UserError, match=f"{base} lacks tokens of conversations .*user_start.*data.prepare"):
        chat(f"--init_from={base}")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--init_from=runs/small is the one from `make train`"),
        (["--init_from=missing"], "missing holds no run"),
        (["--init_optimizer"], "--init_from is missing"),
    ],
)
def test_without_a_network_it_says_what_is_missing(words, says):
    with pytest.raises(UserError, match=says):
        chat(*words)
