"""CORE or ChatCORE by name: of a saved network (evaluate.py), and of a run as it trains."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from data.dataset import Text
from evaluation.chat_core import WITHOUT_PROGRAMS, ChatCore, read_chat_tasks
from evaluation.core import READS, Core, Task, read_bundle
from evaluation.evaluator import Benchmark, Interrupted
from evaluation.scorer import Scorer
from hosts.distributed import check_hosts_agree, on_every_process
from run.network import Network
from training.build import Build

BENCHMARKS: dict[str, Callable[[str, int | None], list[Task]]] = {
    "core": read_bundle,
    "chatcore": read_chat_tasks,
    "chatcore4": partial(read_chat_tasks, labels=WITHOUT_PROGRAMS),
}
"""The functions that read each benchmark's tasks from its folder."""


def read_tasks(name: str, bundle: str, items: int | None) -> list[Task]:
    """Return a benchmark's tasks, each with `items` of its items, or with all. Raise UserError if the bundle cannot be
    read. Every process must call it."""
    return on_every_process("its bundle", lambda: BENCHMARKS[name](bundle, items))


def benchmark_of(name: str, tasks: Sequence[Task], network: Network) -> Core:
    """Return a benchmark on the network's mesh, called with its parameters. Every process must call it."""
    scorer = Scorer(network, READS * network.config.batch.sequence_length)

    def made() -> Core:
        if name == "core":
            return Core(name, tasks, network.tokenizer, scorer)
        return ChatCore(name, tasks, network, scorer)

    core = on_every_process("its benchmark", made)
    check_hosts_agree("their bundle", json.dumps(core.facts))
    return core


def benchmark_of_run(built: Build, text: Text) -> Benchmark:
    """Return `benchmark(params, should_stop)` for `eval.tasks`. It returns the lines of metrics.jsonl: the figure, its
    interval of 95%, and each task's centred accuracy. It raises Interrupted once `should_stop()`, asked after a task.
    """
    options = built.config.eval
    tasks = read_tasks(options.tasks, options.bundle, options.items)
    core = benchmark_of(options.tasks, tasks, Network(built.config, text.tokenizer, {}, built.network))

    def benchmark(params: dict, should_stop: Callable[[], bool]) -> dict[str, Any]:
        def stop_if_asked(_: str) -> None:
            if should_stop():
                raise Interrupted

        results = core(params, say=stop_if_asked)
        of_tasks = {label: task["centered"] for label, task in results["tasks"].items()}
        low, high = results[f"{core.name}_interval"]
        interval = {"low": low, "high": high}  # TensorBoard draws numbers by name
        return {core.name: results[core.name], f"{core.name}_interval": interval, f"{core.name}_tasks": of_tasks}

    return benchmark
