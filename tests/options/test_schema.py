from typing import Annotated, Any, Literal, get_args, get_origin

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta

from options.schema import Config, Role, hints, options, roles, with_options
from options.validation import check_types, resolved, validate
from system.errors import UserError
from tests.helpers import tiny_config
from training.build import build

BASE = Config(name="base")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("name", "", "not empty"),
        ("name", "a/b", "without '/'"),
        ("eval.prompts", ("one", "\udcff"), "UTF-8"),
        ("eval.prompts", "one", "expected `array`"),
        ("steps", -1, "expected `int` >= 0"),
        ("mesh", BASE.model, "of type MeshConfig"),
        ("optimizer.embed.peak_rate", float("nan"), "expected `float` > 0"),
        ("model.remat", "most", "one of 'none', 'products', 'block'"),
        ("model.kv_heads", 4, r"divide model.heads=6: one of \[1, 2, 3, 6\]"),
        ("model.head_dim", 63, "multiple of 2"),
        ("model.window_pattern", "SXL", "letters S"),
        ("model.softcap", 77.0, "with model.vocab_size=32768 the loss overflows float32; at most 76.9"),
        ("model.loss_chunks", 3, "divide batch.sequence_length=2048"),
        ("batch.tokens_per_step", 5000, "multiple of batch.sequence_length=2048; nearest: 4096 or 6144"),
        ("profile.steps", "10", "give FIRST:LAST"),
        ("profile.steps", "990:1001", "the run has 1000 steps"),
        ("mesh.fsdp", 5, "divide model.width=768"),
        ("mesh.tensor", 4, r"divide model.heads=6: one of \[1, 2, 3, 6\]"),
    ],
)
def test_bad_value_is_refused_naming_the_option_its_value_and_what_would_work(name, value, message):
    with pytest.raises(UserError, match=message) as error:
        validate(with_options(BASE, {name: value}))
    assert str(error.value).startswith(f"--{name}={value} cannot work: ")


def test_every_number_has_a_range():
    numbers = [name for name, value in options(BASE).items() if type(value) in (int, float)]
    bare = [n for n in numbers if not any(isinstance(part, Meta) for part in getattr(hints()[n], "__metadata__", ()))]
    assert len(numbers) > 60 and bare == []


def test_home_folders(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = with_options(BASE, {"run_dir": "~/x", "init_from": "~/z"})
    config = resolved(config)
    assert (config.run_dir, config.init_from) == ("/home/me/x", "/home/me/z")
    with pytest.raises(UserError, match="--run_dir=~nobody-here/x cannot work: there is no such home folder"):
        resolved(with_options(BASE, {"run_dir": "~nobody-here/x"}))
    paths = [name for name, of in roles().items() if Role.PATH in of]
    assert paths == ["run_dir", "init_from", "eval.bundle"]
    for url in ("s3://bucket/runs", "gs://bucket", "gs://", "file:///runs", "s3://bucket/gs://bucket/runs"):
        with pytest.raises(UserError, match=f"--run_dir={url} cannot work: .*or gs://BUCKET/FOLDER"):
            resolved(with_options(BASE, {"run_dir": url}))


ANY = st.one_of(
    *(st.none(), st.booleans(), st.integers(-3, 70), st.integers(), st.floats(), st.text(max_size=3)),
    *(st.lists(st.text(max_size=2), max_size=2), st.tuples(st.integers()), st.just(BASE.model)),
)


def fitting(hint: Any) -> st.SearchStrategy:
    """Return a strategy of values near those that the type allows."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    plain = {int: st.sampled_from([1, 2, 3, 4, 8, 16, 266, 512]), float: st.floats(0.001, 3), bool: st.booleans()}
    return plain.get(kind, ANY)


@settings(max_examples=40)
@given(data=st.data())
def test_validate_refuses_by_message_alone_and_what_it_accepts_builds(data):
    """Set random options of every section, sensible and absurd, in a small config."""
    config = resolved(tiny_config())
    names = data.draw(st.lists(st.sampled_from(sorted(hints())), max_size=6, unique=True))
    for name in names:
        kind = fitting(hints()[name])
        config = with_options(config, {name: data.draw(ANY | kind | kind, label=name)})
    try:
        config = resolved(check_types(config))  # as parse does
        validate(config)
        build(config, jax.devices()[:1])
    except UserError as error:
        assert str(error).startswith("--")
