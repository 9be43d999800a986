import ast
import dataclasses
import inspect
from typing import Annotated, Any, Literal, get_args, get_origin

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta

import configs.schema as schema
from configs.schema import Config, Role, UserError, free_to_change, hints, options, roles, with_options
from configs.validation import resolved, validate
from tests.helpers import tiny_config
from training.build import build

BASE = Config(name="base")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("name", "", "not empty"),
        ("name", "a/b", "without '/'"),
        ("name", "caf\udce9", "UTF-8"),
        ("seed", 2**31, "below 2\\^31"),
        ("eval.prompts", ("one", "\udcff"), "UTF-8"),
        ("eval.prompts", "one", "expected `array`"),
        ("steps", 10.0, "expected `int`, got `float`"),
        ("steps", -1, "expected `int` >= 0"),
        ("mesh", BASE.model, "of type MeshConfig"),
        ("optimizer.embed.peak_rate", float("nan"), "expected `float` > 0"),
        ("optimizer.clip_norm", 1e300, "finite"),
        ("optimizer.matrices.beta1", 1.0, "expected `float` < 1"),
        ("model.remat", "most", "one of 'none', 'products', 'block'"),
        ("model.kv_heads", 4, r"divide model.heads=6: one of \[1, 2, 3, 6\]"),
        ("model.head_dim", 63, "multiple of 2"),
        ("model.window_pattern", "SXL", "letters S"),
        ("model.softcap", 77.0, "with model.vocab_size=32768 the loss overflows float32; at most 76.9"),
        ("model.loss_chunks", 3, "divide batch.sequence_length=2048"),
        ("batch.tokens_per_step", 5000, "multiple of batch.sequence_length=2048; nearest: 4096 or 6144"),
        ("batch.tokens_per_step", 100, "nearest: 2048"),
        ("batch.rows_per_device", 0, "expected `int` (>= 1|> 0)"),
        ("profile.steps", "10", "give FIRST:LAST"),
        ("profile.steps", "0:9", "at least 1"),
        ("profile.steps", "990:1001", "the run has 1000 steps"),
        ("mesh.data", 0, "-1 for all"),
        ("mesh.fsdp", 5, "divide model.width=768"),
        ("mesh.tensor", 4, r"divide model.heads=6: one of \[1, 2, 3, 6\]"),
    ],
)
def test_bad_value_is_refused_naming_the_option_its_value_and_what_would_work(name, value, message):
    with pytest.raises(UserError, match=message) as error:
        validate(with_options(BASE, {name: value}))
    assert str(error.value).startswith(f"--{name}={value} cannot work: ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 2**31 - 1),
        ("optimizer.schedule.warmdown", 1),
        ("model.kv_heads", 1),
        ("model.softcap", 76.9),
        ("model.vocab_size", 266),
        ("optimizer.matrices.beta1", 0.0),
        ("mesh.fsdp", 256),
    ],
)
def test_values_at_the_edge_are_valid(name, value):
    validate(with_options(BASE, {name: value}))


def test_options_are_the_command_lines_names():
    flat = options(BASE)
    assert flat["steps"] == 1000
    assert flat["optimizer.schedule.kind"] == "warmup_constant_warmdown"
    assert flat["eval.prompts"] == ("", "", "")
    assert not any(dataclasses.is_dataclass(value) for value in flat.values())
    # Conversely, setting every option to its own value gives the same config.
    for name, value in flat.items():
        assert with_options(BASE, {name: value}) == BASE


def test_every_option_has_a_docstring():
    bare = [
        field.target.id
        for section in ast.walk(ast.parse(inspect.getsource(schema)))
        if isinstance(section, ast.ClassDef)
        for field, after in zip(section.body, [*section.body[1:], None])
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
    ]
    assert set(bare) == {field.name for field in dataclasses.fields(Config) if "Config" in str(field.type)}


def test_every_number_has_a_range():
    numbers = [name for name, value in options(BASE).items() if type(value) in (int, float)]
    bare = [n for n in numbers if not any(isinstance(part, Meta) for part in getattr(hints()[n], "__metadata__", ()))]
    assert len(numbers) > 60 and bare == []


def test_what_may_change_when_a_run_is_continued():
    sections = {"mesh", "log", "eval", "hang", "profile", "diagnostics"}
    single = "run_dir resume name deterministic batch.rows_per_device model.remat model.loss_chunks data.source "
    single += "data.tokenizer data.workers data.copy data.max_epochs checkpoint.every_minutes checkpoint.every_steps "
    single += "checkpoint.keep checkpoint.keep_every"
    for name in options(BASE):
        assert free_to_change(name) == (name.split(".")[0] in sections or name in single.split()), name
    assert not free_to_change("dataset")


def test_home_folders(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = with_options(BASE, {"run_dir": "~/x", "init_from": "~/z"})
    config = resolved(config)
    assert (config.run_dir, config.init_from) == ("/home/me/x", "/home/me/z")
    with pytest.raises(UserError, match="--run_dir=~nobody-here/x cannot work: there is no such home folder"):
        resolved(with_options(BASE, {"run_dir": "~nobody-here/x"}))
    paths = [name for name, of in roles().items() if Role.PATH in of]
    assert paths == ["run_dir", "init_from"]
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
        validate(config)
        config = resolved(config)
        build(config, jax.devices()[:1])
    except UserError as error:
        assert str(error).startswith("--")
