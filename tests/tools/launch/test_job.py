"""Test what every launcher reads: hardware, the job, the archive of the code, and the command line."""

import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from configs.command_line import Exit
from configs.files import cache_dir
from configs.schema import UserError
from tools.launch.__main__ import main
from tools.launch.code import LARGEST, pack, unpack
from tools.launch.job import AGAIN, DONE, NEVER, JobOptions, catalog, job_name, make_job, parse_hardware
from tools.launch.sbatch import VERDICT
from tools.launch.shell import Trouble, ask

ROOT = Path(__file__).parents[3]


def test_hardware_is_parsed_or_refused():
    for text, hosts, per_host, devices in (
        ("v5e:1x1", 1, 1, 1),
        ("v5e:2x4", 1, 8, 8),
        ("v5e:4x4", 4, 4, 16),
        ("2x v5e:4x4", 8, 4, 32),
        ("v5p:2x2x1", 1, 4, 4),
        ("v4:4x4x8", 32, 4, 128),
        ("64x h200:8", 64, 8, 512),
        ("2x cpu:1", 2, 1, 2),
    ):
        hardware = parse_hardware(text)
        assert (hardware.hosts, hardware.devices_per_host, hardware.devices) == (hosts, per_host, devices)
        assert str(hardware) == text
    for text in ("", "v5e", "v5e:3x3", "v5e:16", "v5p:4x4", "v5p:8x4x4", "h200:9", "h200:2x2", "0x cpu:1"):
        with pytest.raises(UserError, match="--hardware"):
            parse_hardware(text)
    for kind, facts in catalog().items():  # what each launcher needs
        if "dimensions" in facts:
            assert facts["zones"] and facts["runtime"] and facts["type"] and facts["units_per_chip"], kind


def test_each_exit_code_is_answered_once():
    answered = [*DONE, *AGAIN, *NEVER]
    assert sorted(answered) == sorted(Exit)
    for lines, expected in (
        (["0 a", "0 b"], "done"),
        (["143 a", "143 b"], "again 143 on b"),
        (["42 a", "1 b"], "never 1 on b"),
        (["137 a", "42 b"], "crash 137 on a"),
        (["42 a", "0 b"], "again 42 on a"),
        (["42 a", "127 b"], "crash 127 on b"),
    ):
        done = subprocess.run(
            ["bash", "-c", f"{VERDICT}\nverdict"], input="\n".join(lines) + "\n", capture_output=True, text=True
        )
        assert done.stdout.strip() == expected


def repository(path: Path) -> Path:
    subprocess.run(["git", "init", "--quiet", path], check=True)
    (path / ".gitignore").write_text("ignored\n")
    (path / "train.py").write_text("one")
    (path / "run.sh").write_text("two")
    (path / "run.sh").chmod(0o755)
    (path / "link").symlink_to("train.py")
    (path / "gone").write_text("")
    subprocess.run(["git", "-C", path, "add", "."], check=True)
    (path / "gone").unlink()
    (path / "ignored").write_text("secret")
    return path


def test_the_code_is_the_work_tree_without_ignored_files_and_its_hash_follows_it_alone(tmp_path):
    root = repository(tmp_path)
    before = pack(root)
    (root / "train.py").touch()
    assert pack(root).digest == before.digest
    for left in ("here/events.jsonl", "here/checkpoints/10/facts", "text/dataset.json", "text/shard.bin"):
        (root / left).parent.mkdir(parents=True, exist_ok=True)
        (root / left).write_text("of a run or a dataset")
    assert pack(root).digest == before.digest
    (root / "new.py").write_text("not added")
    added = pack(root)
    with tarfile.open(fileobj=BytesIO(added.archive)) as archive:
        assert set(archive.getnames()) == added.names
    assert added.names == {".gitignore", "link", "new.py", "run.sh", "train.py"}
    (root / "train.py").write_text("uncommitted")
    assert len({code.digest for code in (before, added, pack(root))}) == 3


def test_unpacking_twice_or_at_once_is_harmless_and_damage_is_refused(tmp_path):
    (tmp_path / "code").mkdir()
    code = pack(repository(tmp_path / "code"))
    archive = tmp_path / "archive.tar"
    archive.write_bytes(code.archive)
    shell = unpack(code, str(archive), str(tmp_path / "there"))
    both = [subprocess.Popen(["bash", "-c", shell]) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert subprocess.run(["bash", "-c", shell], check=False).returncode == 0
    assert [path.name for path in (tmp_path / "there").iterdir()] == [code.name]
    assert (tmp_path / "there" / code.name / "train.py").read_text() == "one"
    archive.write_bytes(code.archive[:-1000])
    again = unpack(code, str(archive), str(tmp_path / "elsewhere"))
    assert subprocess.run(["bash", "-c", again], check=False, capture_output=True).returncode != 0
    assert not (tmp_path / "elsewhere" / code.name).exists()


def test_a_folder_without_git_and_a_large_file_are_refused(tmp_path):
    with pytest.raises(UserError, match="git"):
        pack(tmp_path)
    root = repository(tmp_path)
    with (root / "large.bin").open("wb") as file:
        file.truncate(LARGEST + 1)
    with pytest.raises(UserError, match=r"large\.bin"):
        pack(root)


def test_a_job_is_checked_as_train_py_would(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert (
        make_job(
            JobOptions("v5e:4x4"), ["--config=configs/plain.py", "--model.depth=12", "--data.source=gs://b/text"]
        ).name
        == "plain-d12"
    )
    for hardware, train, message in (
        ("v5e:4x4", [], "arguments are missing"),
        ("v5e:4x4", ["--config=none.py"], "no such file"),
        ("v5e:4x4", ["--config=configs/plain.py", "--model.depth=12", "--mesh.fsdp=3"], "does not fit the 16 devices"),
        ("3x v5e:1x1", ["--config=configs/plain.py", "--model.depth=12"], "cannot share evenly"),
    ):
        with pytest.raises(UserError, match=message):
            make_job(JobOptions(hardware), train)
    for options, message in (
        (JobOptions("v5e:4x4", secret=("NOT_SET",)), "--secret NOT_SET: there is no"),
        (JobOptions("v5e:4x4", env=("A=b",)), "--env takes names of variables alone"),
    ):
        with pytest.raises(UserError, match=message):
            make_job(options, ["--config=configs/plain.py", "--model.depth=12"])
    with pytest.raises(SystemExit) as ended:
        make_job(JobOptions("v5e:4x4"), ["--config=configs/plain.py", "--model.depth=12", "--steps=many"])
    assert ended.value.code == 2


def test_paths_that_hosts_cannot_see_are_refused_and_text_is_required(tmp_path, monkeypatch):
    root = repository(tmp_path)
    (root / "text").mkdir()
    (root / "text" / "one.txt").write_text("travels with the code")
    monkeypatch.chdir(root)
    job = lambda words: make_job(
        JobOptions("v5e:4x4"), [f"--config={ROOT}/configs/plain.py", "--model.depth=12", *words], "/data"
    )
    for words in (
        ["--data.source=stdlib"],
        ["--data.source=gs://b/text", "--data.tokenizer=tiktoken:gpt2"],
        ["--data.source=0.5:/data/a,0.5:s3://b"],
        ["--data.source=./text/*.txt"],
        ["--data.source=text/"],
        ["--data.source=/data/a", f"--data.tokenizer={cache_dir()}/tokenizers/0", "--eval.bundle=/data/bundle"],
    ):
        job(words)
    for words, refused in (
        (["--data.source=/home/me/text"], "--data.source=/home/me/text"),
        (["--data.source=0.5:/data/a,0.5:/home/b"], "--data.source=/home/b"),
        (["--data.source=datasets/mine"], "--data.source=datasets/mine"),
        (["--data.source=file:///home/me"], "--data.source=file:///home/me"),
        (["--data.source=/data/a", "--data.tokenizer=/home/me/t"], "--data.tokenizer=/home/me/t"),
        (["--data.source=/data/a", "--init_from=runs/first"], "--init_from=runs/first"),
    ):
        with pytest.raises(UserError, match=f"{refused} is on this machine, and the hosts cannot see it"):
            job(words)
    with pytest.raises(UserError, match="missing: give gs://BUCKET/FOLDER, or a path below /data, or a file of the co"):
        job([])


def test_names_suit_every_scheduler():
    assert job_name("", "My run/2") == "my-run-2"
    for name in ("-a", "a-", "A", "a_b", "a" * 41, "1"):
        with pytest.raises(UserError, match="--name"):
            job_name(name)


def test_a_server_that_does_not_answer_is_no_mistake():
    """Unlike a refusal, and unlike kubectl's question to localhost:8080 if it has no config."""
    fail = ["sh", "-c", 'echo "$0" >&2; exit 1']
    for says in (
        *("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", "dial tcp: i/o timeout"),
        "The connection to the server 10.0.0.1:6443 was refused - did you specify the right host or port?",
    ):
        with pytest.raises(Trouble, match="ended with 1"):
            ask([*fail, says])
    for says in ("The connection to the server localhost:8080 was refused", "Invalid account or account/partition"):
        with pytest.raises(UserError, match=says):
            ask([*fail, says])


def test_a_mistake_is_one_message_and_code_2_without_jax():
    for words in ([], ["cloud"], ["slurm"], ["slurm", "start"]):
        with pytest.raises(UserError, match=r"python -m tools\.launch( slurm)? takes one of"):
            main(words)
    code = """
import runpy, sys
sys.argv[1:] = ["slurm", "up", "--hardware=v5e:3x3"]
try:
    runpy.run_module("tools.launch", run_name="__main__")
finally:
    assert "jax" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
