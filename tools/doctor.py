"""Run only the checks that a run makes before it compiles anything: python -m tools.doctor --config=FILE [OPTIONS].

Start it as you would start the run: the same command on every host, with the run's options. Exit code 0 if all hosts
can train together, 2 if not, with a line for each problem and its host, 1 if the disk has no room for a checkpoint.
"""

from configs.command_line import parse
from configs.messages import LOGGER
from data.dataset import open_text
from hosts.preflight import preflight, require_room
from hosts.runtime import cache_dir, run_command, start_jax
from run.start import check_processes
from training.build import build


def main() -> int:
    config, arguments = parse(__doc__)
    start_jax()
    built = build(config)
    check_processes(config, arguments)
    micro_batches, rows, length = built.batch_shape
    text = open_text(config.data, config.model.vocab_size, length, micro_batches * rows, cache_dir())
    hosts = preflight(config, built.mesh, text.fingerprint, text.tokenizer.sha256)
    require_room(config)
    for i, host in enumerate(hosts):
        LOGGER.info(f"process {i} on {host.name}: {host.same['devices']}")
    LOGGER.info(", ".join(f"{name} {value}" for name, value in hosts[0].same.items() if name != "devices"))
    LOGGER.info(f"all {len(hosts)} process(es) can train together: {config.run_dir} can be written, the devices add up")
    return 0


if __name__ == "__main__":
    run_command(main)
