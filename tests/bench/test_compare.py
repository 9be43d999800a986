"""Test comparisons of recipes: refusals, what is equal on each axis, verdicts, and the command on two tiny recipes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import psutil
import pytest

import tools.report.__main__ as report
from bench import compare, recipes
from bench.compare import Arguments, Pair, outcome, results
from bench.recipes import Recipe, read_recipes, run_programs
from bench.verdicts import as_table, draw, in_words
from configs.command_line import Exit, config_from_json
from configs.schema import DataConfig, ModelConfig, UserError
from run.record import Events, read_metrics
from tests.hosts.processes import environment_of
from tests.run_folders import write_run
from tests.test_train import CONFIG, wait_until, write_folder

WIDER = "tiny.py --model.width=64 --model.head_dim=32"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Return the current folder, with a config and text to train on."""
    monkeypatch.chdir(write_folder(tmp_path, CONFIG.replace("steps=120", "steps=50")))
    return tmp_path


def compared(monkeypatch, *words: str) -> Exit | int | None:
    """Return the exit code of the command, run in this process."""
    monkeypatch.setattr("sys.argv", ["bench.compare", *words])
    try:
        return compare.main()
    except SystemExit as error:
        return error.code


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("other.py", "other.py: no such file"),
        ("tiny.py --model.kv_heads=7", "kv_heads"),
        ("tiny.py 'x", "No closing quotation"),
        ("tiny.py --resume=never --checkpoint.folder=x --log.on_event=x", "recipes are the same"),
        ("tiny.py --steps=51", r"cannot be paired.*\n  tokens of the run: 25600, and 26112$"),
        ("tiny.py --data.packing=whole", r"cannot be paired.*\n  data.packing: stream or best_fit, and whole$"),
    ],
)
def test_recipes_that_cannot_be_paired_are_refused_before_any_run(folder, monkeypatch, other, reason):
    with pytest.raises(UserError, match=reason):
        compared(monkeypatch, "tiny.py", other)
    assert not (folder / "runs").exists()


def test_options_of_the_command_that_cannot_work_are_refused(folder, monkeypatch, capsys):
    assert compared(monkeypatch, "tiny.py", "tiny.py --model.dept=3") == Exit.MISTAKE
    assert "model.depth" in capsys.readouterr().err and not (folder / "runs").exists()
    with pytest.raises(UserError, match="two recipes or more"):
        compared(monkeypatch, "tiny.py")
    with pytest.raises(UserError, match="--at=seconds needs --at_once=1"):
        compared(monkeypatch, "tiny.py", WIDER, "--at=seconds", "--at_once=2")
    with pytest.raises(UserError, match=r"--at_once=2 needs a number of rows, but tiny[.]py --model.width=64"):
        compared(monkeypatch, "tiny.py", f"{WIDER} --batch.rows_per_device=auto", "--at_once=2")
    recipes = ("tiny.py", "tiny.py --data.packing=best_fit")
    with pytest.raises(UserError, match="compared at equal tokens only"):
        compared(monkeypatch, *recipes, "--at=FLOPs")
    with pytest.raises(UserError, match="held-out rows differ; give --documents=1000"):
        compared(monkeypatch, *recipes, "--documents=0")
    with pytest.raises(UserError, match="and one dataset of text on this machine"):
        compared(monkeypatch, *(f"{recipe} --data.source=0.5:text,0.5:more" for recipe in recipes))
    assert "since the text is a mixture" in capsys.readouterr().out
    (folder / "file").touch()
    with pytest.raises(UserError, match="--out=file cannot be written: File exists"):
        compared(monkeypatch, "tiny.py", WIDER, "--out=file")
    assert not (folder / "runs").exists()


def test_more_steps_of_fewer_tokens_can_be_paired(folder):
    recipes = read_recipes(("tiny.py", "tiny.py --steps=100 --batch.tokens_per_step=256"), folder)
    assert recipes[0].facts == recipes[1].facts


def made_up(folder: Path, name: str, **options) -> Recipe:
    """Return a recipe with a run of seed 0, as train.py would leave it."""
    run = write_run(folder / name, name=name, **options)
    config = config_from_json(json.dumps(json.loads((run / "config.json").read_text())["config"]))
    recipe = Recipe(name, config, folder)
    run.rename(recipe.run_dir(0))
    return recipe


def test_each_axis_compares_where_both_have_spent_the_same(tmp_path, monkeypatch):
    """The other run takes 4/3 of the FLOPs and twice the seconds, so its cuts are at evaluated steps."""
    first, other = made_up(tmp_path, "a"), made_up(tmp_path, "b", slope=0.8, model=ModelConfig(depth=16))
    monkeypatch.setattr(compare, "flops_per_token", lambda model, length: model.depth)
    metrics = other.run_dir(0) / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    doubled = [line | {"seconds": 2 * line["seconds"]} if "seconds" in line else line for line in lines]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in doubled))
    pair = Pair(first, other, 3)
    pair.add(outcome(first, 0, 0), outcome(other, 0, 0))
    ours, theirs = (
        {line["step"]: line["val_bpb"] for line in read_metrics(recipe.run_dir(0)) if "val_bpb" in line}
        for recipe in (first, other)
    )
    for axis, step in {"tokens": 400, "FLOPs": 300, "seconds": 200}.items():
        assert pair.differences[axis] == [pytest.approx(theirs[step] - ours[400])]
        assert pair.shares[axis] == [[1.0, pytest.approx(step / 400)]]


def test_runs_of_other_text_or_code_are_not_paired(tmp_path, monkeypatch):
    first, other = made_up(tmp_path, "a"), made_up(tmp_path, "b")
    outcomes = [outcome(recipe, 0, 0) for recipe in (first, other)]
    (same,) = outcomes[1].made
    for made in (("another", same[1]), (same[0], "another")):
        with pytest.raises(UserError, match="text or code changed"):
            Pair(first, other, 3).add(outcomes[0], outcomes[1]._replace(made={made}))
    before = first.run_dir(0)
    monkeypatch.setattr(recipes, "code_digest", lambda: "another")
    assert Recipe(first.text, first.config, first.out).run_dir(0) != before


def test_equal_seconds_end_at_the_first_run_whose_seconds_say_nothing(folder, monkeypatch):
    first, other = read_recipes(("tiny.py", WIDER), Path("runs/compare"))
    write_run(first.run_dir(0), name="a", steps=50)
    with pytest.raises(UserError, match=f"since {first.run_dir(0).name} was interrupted; delete that folder"):
        compared(monkeypatch, "tiny.py", WIDER, "--at=seconds")
    assert not other.run_dir(0).exists()


PROGRAM = """
import os, signal, sys, time
from pathlib import Path
name, code, after, *others = sys.argv[1:]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
Path(name).write_text(os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "not set"))
while not all(Path(other).exists() for other in others):
    time.sleep(0.01)
time.sleep(float(after))
sys.exit(int(code))
"""


def side_by_side(folder: Path, programs: str, at_once: int) -> tuple[dict[int, int], list[int]]:
    """Return the exit codes of programs, each `NAME CODE SECONDS [OTHERS]`, and the numbers of those that completed. A
    program waits until the others have begun, then for the seconds."""
    (folder / "program.py").write_text(PROGRAM)
    commands = [[str(folder / "program.py"), *program.split()] for program in programs.split(",")]
    completed: list[int] = []
    return run_programs(commands, [sys.stderr] * len(commands), at_once, completed.append), completed


def test_programs_run_side_by_side_and_share_a_gpu_s_memory(folder):
    codes, completed = side_by_side(folder, "a 0 0 b,b 0 0 a,c 0 0", 2)  # a and b wait for each other
    assert codes == {0: 0, 1: 0, 2: 0} and sorted(completed) == [0, 1, 2]
    assert Path("a").read_text() == "false"
    side_by_side(folder, "a 0 0", 1)
    assert Path("a").read_text() == "not set"


def test_the_first_failure_ends_the_others(folder):
    codes, completed = side_by_side(folder, "a 0 99,b 7 0 a,c 0 0", 2)
    assert list(codes.items()) == [(1, 7), (0, 143)] and not completed and not Path("c").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_programs(folder, number):
    """A terminal sends Ctrl-C to the programs, too."""
    seen = []

    def interrupt() -> None:
        wait = lambda: [path for path in (Path("a"), Path("b")) if path.exists()]
        while len(wait()) < 2:
            time.sleep(0.01)
        children = [child.pid for child in psutil.Process().children() if "program.py" in " ".join(child.cmdline())]
        for pid in [os.getpid(), *(children if number == signal.SIGINT else [])]:
            os.kill(pid, number)
        seen.extend(children)

    before = signal.getsignal(number)
    thread = Thread(target=interrupt)
    thread.start()
    codes, _ = side_by_side(folder, "a 0 99,b 0 99,c 0 0", 2)
    thread.join()
    assert codes == {0: 128 + number, 1: 128 + number} and len(seen) == 2 and not Path("c").exists()
    assert signal.getsignal(number) == before


def test_other_rows_are_compared_by_the_first_rows_of_documents(tmp_path):
    """Rows and complete documents say that the other recipe is better, first rows that it is worse."""
    first, other = made_up(tmp_path, "a"), made_up(tmp_path, "b", slope=2.0, data=DataConfig(packing="best_fit"))
    pair = Pair(first, other, 3)
    for seed in range(3):
        ours, theirs = {"x": (100.0, 50), "y": (30.0, 50)}, {"x": (110.0, 50), "y": (31.0 + seed, 50)}
        outcomes = [outcome(recipe, 0, 0) for recipe in (first, other)]
        ours, theirs = ({"documents": theirs, "first_rows": ours}, {"documents": ours, "first_rows": theirs})
        pair.add(outcomes[0]._replace(**ours), outcomes[1]._replace(**theirs))
    made = results([pair], Arguments(("a", "b"), seeds=3))
    (of,) = made["comparisons"]
    assert of["axes"].keys() == {"tokens"} and of["axes"]["tokens"]["by_seed"] == pytest.approx([0.11, 0.12, 0.13])
    assert of["seconds_not_comparable"] == "" and of["documents"]["difference"] == pytest.approx(0.12)
    assert of["verdict"].startswith("b is worse than a at equal tokens, +0.1200")
    assert all("bits per byte of the first rows of documents" in text for text in (of["verdict"], in_words(of, 1)))
    draw(made, tmp_path / "compare.png")
    *_, line = as_table(made).splitlines()
    low, high = of["axes"]["tokens"]["interval"]
    p = of["axes"]["tokens"]["p_corrected"]
    assert line == f"| `b` | +0.1200 [{low:+.4f}, {high:+.4f}], of the first rows of documents | {p:.2g} | 3 |"


def verdict_of(differences: list[float]) -> str:
    """Return the verdict on a pair with these differences by seed, of at most five."""
    pair = Pair(*(Recipe(name, config_from_json('{"name": "x"}'), Path("nowhere")) for name in "AB"), 5)
    for value in differences:
        for axis in pair.differences:
            pair.differences[axis].append(value)
            pair.shares[axis].append([1.0, 1.0])
        pair.documents.append(({}, {}))
    return results([pair], Arguments(("A", "B")))["comparisons"][0]["verdict"]


def test_a_verdict_says_what_the_seeds_show():
    assert verdict_of([-0.1]) == "B minus A: no verdict on the recipes, since there is one seed."
    assert verdict_of([-0.1, -0.1001, -0.0999]).startswith("B is better than A at equal tokens, -0.1000 [-0.1")
    assert verdict_of([0.1, 0.1001, 0.0999]).startswith("B is worse than A at equal tokens, +0.1000 [+0.0")
    assert verdict_of([-0.1, 0.1, 0.0]).startswith("B minus A: no difference is shown so far at equal tokens, ")
    assert verdict_of([-0.1, 0.1] * 2 + [0.0]).startswith("B minus A: no difference is shown after all seeds at equal")


def test_seeds_are_added_until_each_difference_is_clear(folder, monkeypatch, capsys):
    texts = ("tiny.py", "tiny.py --model.depth=3", "tiny.py --model.depth=4")
    first, better, similar = read_recipes(texts, Path("runs/compare"))
    for seed in range(5):
        for recipe, slope in ((first, 1.0), (better, 1.5 + seed / 1000), (similar, 1 + 0.01 * (-1) ** seed)):
            write_run(recipe.run_dir(seed), name=recipe.run_dir(seed).name, steps=50, slope=slope)
    assert compared(monkeypatch, *texts, "--seeds=4", "--documents=0") == Exit.COMPLETE
    pairs = json.loads(Path("runs/compare/compare.json").read_text())["comparisons"]
    assert [pair["seeds"] for pair in pairs] == [2, 4]
    assert "depth=3 is better than tiny.py at" in pairs[0]["verdict"] and "no difference" in pairs[1]["verdict"]
    assert pairs[0]["axes"]["tokens"]["p_corrected"] == 2 * pairs[0]["axes"]["tokens"]["p"]
    printed = capsys.readouterr().out
    assert all(pair["verdict"] in printed for pair in pairs) and "of its run)" in printed
    table = Path("runs/compare/compare.md").read_text().splitlines()
    assert table[0].startswith("| minus `tiny.py` | bits per byte at equal tokens") and len(table) == 4
    monkeypatch.setattr("sys.argv", ["report", "runs/compare"])
    assert report.main() == Exit.COMPLETE
    page = Path("runs/compare/report.html").read_text()
    for pair in pairs:
        assert pair["verdict"] in page and f"not comparable: {pair['seconds_not_comparable']}" in page


@pytest.mark.medium
def test_a_killed_comparison_continues_and_repeats_no_run(folder, monkeypatch):
    words = ["tiny.py", WIDER, "--seeds=1", "--documents=3"]
    command = subprocess.Popen(
        [sys.executable, "-m", "bench.compare", *words, "--at_once=2"],
        cwd=folder,
        env=environment_of(1),
        stderr=subprocess.PIPE,
    )
    recipe, wider = read_recipes(("tiny.py", WIDER), Path("runs/compare"))
    runs = [recipe.run_dir(0), wider.run_dir(0)]
    wait_until((runs[0] / "checkpoints" / "20").exists, command)
    os.kill(int((runs[0] / "lock").read_text().split()[1]), signal.SIGKILL)
    assert b"train.py ended with exit code 137" in command.communicate()[1] and command.returncode == 137
    assert compared(monkeypatch, *words) == Exit.COMPLETE
    starts = lambda: [sum(event["event"] == "start" for event in Events(run).read()) for run in runs]
    before = starts()
    assert before[0] == 2
    made = json.loads(Path("runs/compare/compare.json").read_text())
    (pair,) = made["comparisons"]
    first, other = (json.loads((run / "summary.json").read_text())["val_bpb"] for run in runs)
    assert pair["axes"]["tokens"]["by_seed"] == [pytest.approx(other - first)]
    shares = pair["axes"]["FLOPs"]["shares_of_runs"]
    assert shares[0] == 1 and 0.2 < shares[1] < 0.6  # four times the parameters of a matrix
    assert pair["documents"]["documents"] == 3 and pair["seconds_not_comparable"].endswith("was interrupted")
    complete, first_rows = recipe.documents(0, 3)
    for name, (bits, size) in first_rows.items():
        assert 0 < size < complete[name][1] and 0 < bits < complete[name][0]  # each text is of several rows
    assert compared(monkeypatch, *words) == Exit.COMPLETE  # from the folder alone
    assert starts() == before and json.loads(Path("runs/compare/compare.json").read_text()) == made
