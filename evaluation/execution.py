"""A program that a network wrote, run in a process of its own.

The limits stop accidents: an endless loop, a full memory, a file that is written, another process, a connection. They
do not stop a program that means harm. Run a network that you do not trust in a container.
"""

import subprocess
import sys
import tempfile

SECONDS = 5.0
MEMORY = 256 * 2**20  # bytes of address space
GUARD = """
import os, sys
if sys.platform != "darwin":  # which refuses the limit
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
READING = {"os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.putenv", "os.unsetenv"}

def refuse(event, arguments):
    starts_or_connects = event.startswith(("os.", "pty.", "shutil.", "socket.", "subprocess."))
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING
    if writes or (starts_or_connects and event not in READING):
        raise PermissionError(event)

program = sys.stdin.buffer.read()
sys.addaudithook(refuse)  # the program cannot remove it
exec(compile(program, "<answer>", "exec"), {"__name__": "__main__"})
""".replace("MEMORY", str(MEMORY))


def succeeds(program: str, seconds: float = SECONDS) -> bool:
    """Return whether a Python program ends within `seconds`, without an exception."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended = subprocess.run(
                [sys.executable, "-I", "-B", "-c", GUARD],  # isolated, and without files of bytecode
                input=program.encode(errors="replace"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={},
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return False
    return ended.returncode == 0
