"""Imitate SLURM's sbatch, srun, scontrol, squeue, scancel and sinfo, given as the first word, on local processes.

Jobs are in the folder FAKE_SLURM. As in SLURM, a job's script restarts only if it asks; signals reach every process of
the tasks but not the script; srun ends with the highest code of its tasks.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

HOME = Path(os.environ["FAKE_SLURM"])


def jobs() -> dict[str, dict]:
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(HOME.glob("*/job.json"))}


def update(job: str, **facts) -> None:
    path = HOME / job / "job.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(known | facts))
    fresh.rename(path)


def sbatch(script: str) -> int:
    job = str(len(jobs()) + 1)
    (HOME / job).mkdir()
    text = Path(script).read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", text, re.MULTILINE))
    (HOME / job / "script").write_text(text)  # SLURM stores a copy
    update(job, state="PENDING", restarts=0, options=options)
    null = subprocess.DEVNULL  # sbatch's caller does not wait for the job's output
    subprocess.Popen([sys.executable, __file__, "run", job], stdout=null, stderr=null, start_new_session=True)
    print(f"Submitted batch job {job}")
    return 0


def run(job: str) -> int:
    while True:
        facts = jobs()[job]
        update(job, state="RUNNING")
        own = {name: value for name, value in os.environ.items() if not name.startswith("GIVEN_")}  # --export=NONE
        environment = own | {
            "SLURM_JOB_ID": job,
            "SLURM_NTASKS": facts["options"]["nodes"],
            "SLURM_JOB_NODELIST": "localhost,otherhost",
            "SLURM_JOB_NUM_NODES": facts["options"]["nodes"],
            "SLURM_JOB_PARTITION": "all",
            "SLURM_RESTART_COUNT": str(facts["restarts"]),
            "LAUNCH_PAUSE": "0",
        }
        with open(facts["options"]["output"], "ab") as log:
            done = subprocess.run(["bash", HOME / job / "script"], env=environment, stdout=log, stderr=log)
        if not (HOME / job / "requeue").exists():
            update(job, state="ENDED", code=done.returncode)
            return 0
        (HOME / job / "requeue").unlink()
        update(job, state="PENDING", restarts=facts["restarts"] + 1)


def srun(*words: str) -> int:
    options = words[: words.index("bash")]
    assert "--kill-on-bad-exit=0" in options  # or a task that ends first would end the others while they save
    command, job, tasks, labels = words[len(options) :], os.environ["SLURM_JOB_ID"], [], []
    for number in range(int(os.environ["SLURM_NTASKS"])):
        host = ("localhost", "otherhost")[number]
        environment = os.environ | {"SLURM_PROCID": str(number), "SLURMD_NODENAME": host}
        labels.append(subprocess.Popen(["sed", "-u", f"s/^/{number}: /"], stdin=subprocess.PIPE))
        tasks.append(subprocess.Popen(command, env=environment, stdout=labels[-1].stdin, start_new_session=True))
        labels[-1].stdin.close()
    (HOME / job / "tasks").write_text(" ".join(str(task.pid) for task in tasks))
    codes = [task.wait() for task in tasks]
    for label in labels:
        label.wait()
    (HOME / job / "tasks").unlink()
    return max(code if code >= 0 else 128 - code for code in codes)


def scontrol(*words: str) -> int:
    if words[:2] == ("show", "hostnames"):
        print(words[2].replace(",", "\n"))
        return 0
    if words[:2] == ("show", "job"):
        print("   ReqNodeList=(null) ExcNodeList=(null)")
        return 0
    assert words[0] == "requeue"
    deaf = HOME / "deaf"  # the number of calls without an answer
    if deaf.exists() and (times := int(deaf.read_text())):
        deaf.write_text(str(times - 1))
        print("scontrol: error: Unable to contact slurm controller", file=sys.stderr)
        return 1
    (HOME / words[1] / "requeue").touch()
    return 0


def mine(words: tuple[str, ...]) -> dict[str, dict]:
    name = next(word.split("=")[1] for word in words if word.startswith("--name="))
    return {
        job: facts
        for job, facts in jobs().items()
        if facts["options"]["job-name"] == name and facts["state"] != "ENDED"
    }


def squeue(*words: str) -> int:
    print("\n".join(job if "--format=%i" in words else f"{job} {facts['state']}" for job, facts in mine(words).items()))
    return 0


def sinfo(*words: str) -> int:
    print(2)  # nodes: none to spare
    return 0


def scancel(*words: str) -> int:
    for job, facts in (mine(words) if any(word.startswith("--name=") for word in words) else jobs()).items():
        if "--signal=TERM" in words and facts["state"] == "RUNNING":
            while not (HOME / job / "tasks").exists():
                time.sleep(0.01)
            for task in (HOME / job / "tasks").read_text().split():
                os.killpg(int(task), signal.SIGTERM)
    return 0


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    sys.exit({f.__name__: f for f in (sbatch, run, srun, scontrol, squeue, scancel, sinfo)}[name](*words))
