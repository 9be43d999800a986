"""Run the commands of docs/speedrun.md at a tiny size, on stand-in data with the columns of the hub's."""

import io
import re
import shlex
import sys
from typing import ClassVar

import jax
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import chat
import data.prepare.__main__
import evaluate
import export
import sample
import train
from hosts.runtime import run_command
from options.command_line import parse, parse_arguments
from tests.data.prepare.hub import Hub, ask, serving
from tests.evaluation import core_bundle
from tests.repository import ROOT
from tools import plan, report

PAGE = (ROOT / "docs/speedrun.md").read_text()
CODE = "".join(re.findall(r"^```\n(.*?)^```", PAGE, re.M | re.S))
LINES = CODE.replace("\\\n", "").splitlines()
TINY = "--model.depth=1 --model.vocab_size=320 --batch.sequence_length=128 --batch.tokens_per_step=512 --steps=3"
TINY += " --eval.tokens=1024 --batch.rows_per_device=2 --model.dtype=float32"
MAINS = {
    "python -m data.prepare": (data.prepare.__main__.main, "--val_fraction=0.2 --workers=1"),
    "launch/loop.sh": (train.main, TINY),
    "python -m tools.report": (report.main, ""),
    "python evaluate.py": (evaluate.main, ""),
    "python sample.py": (sample.main, "--tokens=8"),
    "python chat.py": (chat.main, ""),
    "python export.py": (export.main, ""),
}


def table(columns: dict[str, list]) -> bytes:
    content = io.BytesIO()
    pq.write_table(pa.table(columns), content)
    return content.getvalue()


WORDS = core_bundle.words()
TURNS = [[{"role": "user", "content": f"Say {w}."}, {"role": "assistant", "content": f"It is {w}."}] for w in WORDS]


class Both(Hub):
    """Serve ClimbMix and SmolTalk, each with one small file; SmolTalk has a test split, too."""

    repositories: ClassVar = {
        "karpathy/climbmix-400b-shuffle": {
            "shard_00000.parquet": table({"text": [" ".join(WORDS[i : i + 40]) for i in range(300)]})
        },
        "HuggingFaceTB/smol-smoltalk": {
            "data/train-00000-of-00001.parquet": table({"messages": TURNS[:200], "source": ["made"] * 200}),
            "data/test-00000-of-00001.parquet": table({"messages": TURNS[:20], "source": ["made"] * 20}),
        },
    }


@pytest.mark.medium
def test_the_commands_lead_from_nothing_to_an_export_that_chats(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.setattr(core_bundle, "TASKS", core_bundle.TASKS[:1])
    core_bundle.make_bundle(tmp_path / "eval_bundle")
    ran, one = [], jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: one)
    with serving(Both) as endpoint:
        ask(endpoint, monkeypatch, tmp_path)
        for line in LINES:
            name, words = next(((name, line.removeprefix(name)) for name in MAINS if line.startswith(name)), ("", ""))
            if "tools.plan" in line:
                assert parse("", plan.Arguments, shlex.split(line)[3:])[1].topology == "h100:8"
            elif "--serve" in line:
                assert parse_arguments("", chat.Arguments, shlex.split(words)).serve
            elif name:
                main, more = MAINS[name]
                more += " --vocab_size=320" * ("climbmix" in line and "prepare" in name)
                monkeypatch.setattr(sys, "argv", [name, *shlex.split(f"{words} {more}")])
                with pytest.raises(SystemExit) as end:
                    run_command(main)
                assert not end.value.code, (line, capfd.readouterr().err)
                ran.append(name)
            else:
                assert line.split()[0] in ("make", "source", "curl", "unzip") or "launch/speedrun.sh" in line, line
    assert set(ran) == set(MAINS) and ran.count("launch/loop.sh") == 2
    assert (tmp_path / "exports/d20-chat/model.safetensors").exists()
    assert list((tmp_path / "runs/d20/core").rglob("core.json"))
