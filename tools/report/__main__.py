"""Write a self-contained HTML page about one or more runs: python -m tools.report RUN [RUN...].

It needs no accelerator and does not start JAX. --follow serves the page to this machine only, and keeps it up to date.
"""

import json
import sys
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

import tyro

from configs.command_line import Exit, exit_code_of, parse_arguments
from configs.files import write_whole
from configs.schema import AnyPaths, FilePath, NotNegative, Positive, UserError
from tools.report.page import contents, page
from tools.report.runs import read_comparisons, read_runs


@dataclass(frozen=True)
class Arguments:
    """Options of this command."""

    runs: Annotated[AnyPaths, tyro.conf.Positional]
    """Folders of runs, here or at gs://, each with a config.json; or of bench.compare."""
    out: FilePath = ""
    """The page, which opens from the disk, without a network. Default: report.html in the first run's folder, or here
    if that run is at gs://."""
    follow: bool = False
    """Serve the page at http://localhost:PORT instead of writing it, and read the runs again while it is open."""
    port: NotNegative[int] = 8420
    """Port of `follow`; 0: any free port."""
    every_seconds: Positive[int] = 10
    """Seconds between two readings of the runs, for `follow`."""


def read_contents(folders: list[str]) -> dict[str, Any]:
    """Return the page's contents, from what the folders contain now."""
    comparisons = [pair for folder in folders for pair in read_comparisons(folder)]
    return contents(read_runs(folders), time.time(), comparisons)


def serve(folders: list[str], port: int, every_seconds: int) -> None:
    """Serve the page to this machine until an interrupt. Raise UserError if the port is taken."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kinds = {"/": "text/html; charset=utf-8", "/report.json": "application/json"}
            if self.path not in kinds:
                return self.send_error(404)
            try:
                shown = read_contents(folders)
            except UserError as error:  # a run that is being moved or deleted
                return self.send_error(503, explain=str(error))
            body = (page(shown, every_seconds) if self.path == "/" else json.dumps(shown)).encode()
            self.send_response(200)
            self.send_header("Content-Type", kinds[self.path])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing: a line per request would hide what matters."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        raise UserError(f"--port={port} cannot be served ({error}); 0 takes any free port") from error
    with server:
        print(f"http://localhost:{server.server_port}  (Ctrl-C ends it)", flush=True)
        server.serve_forever()


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    if not arguments.runs:
        raise UserError("name at least one run's folder: python -m tools.report runs/small")
    shown = read_contents(list(arguments.runs))
    if arguments.follow:
        serve(list(arguments.runs), arguments.port, arguments.every_seconds)
    folder = Path() if "://" in arguments.runs[0] else Path(arguments.runs[0])
    out = Path(arguments.out or folder / "report.html")
    try:
        write_whole(out, page(shown))
    except OSError as error:
        raise UserError(f"--out={out} cannot be written: {error}") from error
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB, on {shown['title']}")
    return Exit.COMPLETE


if __name__ == "__main__":
    sys.exit(exit_code_of(main, "interrupted"))
