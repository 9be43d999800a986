"""Test which commit of nanochat a checkpoint's arrays tell, without nanochat's code and without torch. The names and
shapes were written down from networks of nanochat's code at each commit."""

import pytest

from interchange.nanochat import GENERATIONS, describe_network, describe_training, generation_of, short_window
from options.schema import Config
from options.validation import resolved, validate
from system.errors import UserError
from tests.interchange.nanochat_history import SIZES

PLAIN = {"transformer.wte.weight": (300, 64), "lm_head.weight": (300, 64), "transformer.h.0.attn.c_q.weight": (64, 64)}
PADDED = PLAIN | {"transformer.wte.weight": (320, 64), "lm_head.weight": (320, 64)}
LAMBDAS = PADDED | {"resid_lambdas": (4,), "x0_lambdas": (4,)}
EVERY = LAMBDAS | {"v0_lambdas": (4,)} | {f"value_embeds.{i}.weight": (320, 32) for i in range(4)}
OTHER = LAMBDAS | {"value_embeds.1.weight": (320, 32), "value_embeds.3.weight": (320, 32)}


def gates(channels: int) -> dict[str, tuple[int, ...]]:
    return {f"transformer.h.{i}.attn.ve_gate.weight": (1, channels) for i in (1, 3)}


LAST = OTHER | gates(12) | {"smear_gate.weight": (1, 24), "smear_lambda": (1,), "backout_lambda": (1,)}


@pytest.mark.parametrize(
    ("generation", "shapes"),
    [
        ("3a5e0bc", PLAIN),
        ("3a5e0bc", PADDED),
        ("aa530cd", LAMBDAS),
        ("9a88194", EVERY),
        ("6ed7d1d", OTHER | gates(12)),
        ("a825e63", LAST),
    ],
)
def test_arrays_tell_the_generation(generation, shapes):
    assert generation_of(shapes, None) == generation
    with pytest.raises(UserError, match=r"nanochat_cap=aba30cb is for networks whose .* gates of 32 channels"):
        generation_of(shapes, "aba30cb")


def test_a_cap_that_the_arrays_do_not_tell_is_asked_for():
    shapes = OTHER | gates(32)
    with pytest.raises(
        UserError, match=r"15, and from aba30cb \(2026-03-02\) on at 20.*give --nanochat_cap=e85db6b if"
    ):
        generation_of(shapes, None)
    caps = {cap: GENERATIONS[generation_of(shapes, cap)].get("softcap", 15.0) for cap in ("e85db6b", "aba30cb")}
    assert caps == {"e85db6b": 15.0, "aba30cb": 20.0}


@pytest.mark.parametrize("name", ["value_embed.weight", "value_embed_A.weight", "bigram_lambdas"])
def test_an_experiment_is_refused_by_name(name):
    with pytest.raises(UserError, match=rf"^{name} is of .*2026-01-.*, an experiment of nanochat's"):
        generation_of(OTHER | {name: (4,)}, None)


def test_each_generation_has_its_network():
    meta = {"model_config": SIZES | {"window_pattern": "SSSL", "sequence_len": 2048}}
    networks = {name: describe_network(meta, name)[0] for name in GENERATIONS}
    for model in networks.values():
        validate(resolved(Config(name="one", model=model)))
    of = lambda option: [getattr(model, option) for model in networks.values()]
    assert of("rotary_base") == [1e4] * 5 + [1e5] * 2
    assert of("qk_scale") == [1.0] * 5 + [1.15, 1.2]
    assert of("softcap") == [15, 15, 15, 15, 20, 15, 15]
    assert of("short_window") == [1024] * 5 + [768, 512]
    assert of("resid_lambdas") == of("x0_lambdas") == [False] + [True] * 6
    assert of("value_embeddings") == [False] * 2 + [True] * 5
    assert of("smear") == of("backout") == [False] * 6 + [True]
    assert [short_window(name, 256) for name in GENERATIONS] == [128] * 7
    assert describe_network({"model_config": SIZES}, "aa530cd")[0].window_pattern == "L"  # as nanochat reads it


def test_the_stage_the_batch_and_the_rates_are_in_the_meta_file():
    """base_train.py alone writes max_seq_len, at each of its commits."""
    rates = {"embedding_lr": 0.2, "matrix_lr": 0.02, "unembedding_lr": None}
    pretrained = {"max_seq_len": 2048, "user_config": rates | {"total_batch_size": 2**18}}
    tokens_per_step, chat, options = describe_training(pretrained)
    assert (tokens_per_step, chat) == (2**18, False) and options["optimizer.embed.peak_rate"] == 0.2
    automatic = pretrained | {"total_batch_size": 2**20, "user_config": {"total_batch_size": -1}}
    assert describe_training(automatic)[:2] == (2**20, False)
    assert describe_training({"step": 650, "val_loss": 1.0})[:2] == (2**19, True)  # of chat_sft.py in 2025
    assert describe_training({})[:2] == (2**19, True)  # of chat_rl.py
