"""Train nanochat's own network, with its own optimizer and recipe, on the batches of a config.

NANOCHAT_DIR=CHECKOUT python -m bench.nanochat --config=configs/small.py --device=cuda --out=runs/nanochat

Text, rows, their order, micro-batches, steps, evaluated steps and held-out rows are those of `train.py` with the same
options, on one device. Depth, width, heads, vocabulary and windows are the config's. Everything else of the network and
of the optimizer is nanochat's, so other options of `model` and `optimizer` have no effect. Rates, decay and schedules
follow its scripts/base_train.py at its default arguments. The last line of the output has tokens_per_second, and the
attention that ran.
"""

import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from configs.nanochat import REFERENCE_BATCH, REFERENCE_DEPTH, network_of_depth
from evaluation.evaluator import Evaluator, evaluate
from hosts.clock import Timeline
from hosts.runtime import run_command, start_jax
from options.command_line import parse
from options.schema import Config, FilePath, ModelConfig, Positive, with_options
from options.validation import require_steps
from run.folder import RunFolder
from run.source import ResumePoint
from run.text import TextSource, open_text_of_run
from system.errors import UserError
from system.files import is_there, write_whole
from system.messages import LOGGER


@dataclass(frozen=True)
class Arguments:
    """Where and how nanochat trains."""

    out: FilePath = "runs/nanochat"
    """A new folder for metrics.jsonl, a line for each evaluated step, and summary.json, its last line with what was
    used."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of torch: nanochat computes in bfloat16 on a GPU, in float32 on a CPU. Our part, which reads the text, is
    always on the CPU."""
    fp8: bool = False
    """Multiply in fp8 on a GPU, as nanochat's `--fp8` does; evaluation, too."""
    rate_factor: Positive[float] = 1.0
    """Factor of all rates. nanochat multiplies them by the root of a step's tokens / 2^19. That is 0.088 for 4,096, and
    11.3 undoes it."""


class Schedules(NamedTuple):
    """The schedules of nanochat's scripts/base_train.py, with its default arguments, as functions of the steps
    taken."""

    steps: int
    """Steps of the run."""

    @property
    def warmdown(self) -> int:
        """Return the number of steps at the end in which the rate falls (`warmdown_iters`)."""
        return round(0.65 * self.steps)

    def rate(self, step: int) -> float:
        """Return the factor of every rate (`get_lr_multiplier`): it rises to 1 over 40 steps, and falls to 0.05."""
        if step < 40:
            return (step + 1) / 40
        return 0.05 + 0.95 * min(1.0, (self.steps - step) / self.warmdown)

    def momentum(self, step: int) -> float:
        """Return Muon's momentum (`get_muon_momentum`): it rises from 0.85 to 0.97 over 400 steps, and then falls to
        0.9 during the warmdown."""
        if step < 400:
            return 0.85 + 0.12 * step / 400
        return 0.97 - 0.07 * max(0.0, 1 - (self.steps - step) / self.warmdown)

    def decay(self, step: int) -> float:
        """Return the factor of Muon's weight decay (`get_weight_decay`): a half cosine."""
        return (1 + math.cos(math.pi * step / self.steps)) / 2


def scaled(parameters: int, reference: int, tokens_per_step: int) -> dict[str, float]:
    """Return the options of nanochat's `setup_optimizer`, from the parameters of blocks and head of the network and of
    the reference of depth 12. base_train.py multiplies rates by the root of the batch over 2^19 (`batch_lr_scale`), and
    the decay also by the reference's horizon over this network's (`weight_decay_scaled`). A horizon is 12 tokens a
    parameter, whatever the run's steps."""
    root = math.sqrt(tokens_per_step / REFERENCE_BATCH)
    rates = {"unembedding_lr": 0.008, "embedding_lr": 0.3, "scalar_lr": 0.5, "matrix_lr": 0.02}
    decay = 0.28 * root * (12 * reference) / int(12 * parameters)
    return {name: rate * root for name, rate in rates.items()} | {"weight_decay": decay}


def micro_batches(batch: dict[str, Any], device: str) -> Iterator[tuple[Any, Any, Any]]:
    """Yield inputs, targets and weights [B, T] of each micro-batch of a batch [K, B, T], as tensors on the device. The
    host does not wait for what the device has to do before."""
    import torch

    names = ("inputs", "targets", "weights")
    tensors = [torch.tensor(np.asarray(batch[name])).to(device, non_blocking=True) for name in names]
    yield from zip(tensors[0].long(), tensors[1].long(), tensors[2])


def summed(network: Any, batch: dict[str, Any], device: str) -> tuple[list[float], list[float]]:
    """Return each micro-batch's loss, summed in nats, and its number of counted targets, as our `eval_step` does."""
    import torch

    sums, counts = [], []
    with torch.no_grad():
        for inputs, targets, weights in micro_batches(batch, device):
            losses = network(inputs, targets, loss_reduction="none")
            sums.append((losses * weights.flatten()).sum().item())
            counts.append(weights.sum().item())
    return sums, counts


def new_network(model: ModelConfig, length: int, dtype: str = "float32", compiled: bool = False) -> Any:
    """Return nanochat's network (torch) of these sizes, for rows of `length` tokens, freshly initialized. `compiled`:
    its optimizer's steps may be compiled. Only the first call in a process chooses that and `dtype`. UserError if
    NANOCHAT_DIR names no checkout."""
    if "NANOCHAT_DIR" not in os.environ:
        raise UserError("NANOCHAT_DIR names no checkout of nanochat")
    os.environ |= {"NANOCHAT_DTYPE": dtype, "TORCHDYNAMO_DISABLE": str(int(not compiled))}
    sys.path.append(os.environ["NANOCHAT_DIR"])
    from nanochat.gpt import GPT, GPTConfig  # pyright: ignore[reportMissingImports]

    sizes = {"n_layer": model.depth, "n_head": model.heads, "n_kv_head": model.kv_heads, "n_embd": model.width}
    sizes |= {"vocab_size": model.vocab_size, "sequence_len": length, "window_pattern": model.window_pattern}
    network = GPT(GPTConfig(**sizes))
    network.init_weights()
    return network


def fastest_attention() -> tuple[str, Callable | None]:
    """Return the name of the fastest attention installed for a GPU, and its function. None: nanochat's own choice,
    which is FlashAttention 3 if it can be downloaded, and else torch's attention."""
    import torch

    with suppress(ImportError):
        newest = importlib.import_module("flash_attn.cute.interface").flash_attn_func  # of flash-attn-4

        @torch.compiler.disable  # its kernels are compiled by other means
        def without_bounds(q: Any, k: Any, v: Any, causal: bool, window_size: tuple[int, int]) -> Any:
            left, right = (None if size < 0 else size for size in window_size)
            return newest(q, k, v, causal=causal, window_size=(left, right))[0]

        return "FlashAttention 4", without_bounds
    with suppress(ImportError):
        return "FlashAttention 3", importlib.import_module("flash_attn_interface").flash_attn_func
    if importlib.import_module("nanochat.flash_attention").USE_FA3:
        return "FlashAttention 3, downloaded", None
    return "cuDNN's by torch, a lower bound: it computes what windows hide", None


def use_attention(function: Callable | None) -> None:
    """Let nanochat call `function` on a GPU. Of torch's kernels leave cuDNN's alone, so that torch fails where it would
    take a slower one in silence."""
    import torch

    nanochat: Any = importlib.import_module("nanochat.flash_attention")
    kernels = torch.backends.cuda
    if function is not None:
        nanochat.USE_FA3, nanochat._fa3 = True, SimpleNamespace(flash_attn_func=function)
    kernels.enable_cudnn_sdp(True)
    for enable in (kernels.enable_flash_sdp, kernels.enable_mem_efficient_sdp, kernels.enable_math_sdp):
        enable(False)


def multiply_in_fp8(network: Any) -> None:
    """Replace the layers that nanochat's `--fp8` replaces."""
    from nanochat.fp8 import Float8LinearConfig, convert_to_float8_training  # pyright: ignore[reportMissingImports]
    from torch.nn import Linear

    def fits(layer: Any, _: str) -> bool:
        sizes = (layer.in_features, layer.out_features) if isinstance(layer, Linear) else (0,)
        return all(size >= 128 and size % 16 == 0 for size in sizes)

    recipe = Float8LinearConfig.from_recipe_name("tensorwise")
    convert_to_float8_training(network, config=recipe, module_filter_fn=fits)


class Trainer:
    """nanochat's network and optimizer, on a device."""

    def __init__(self, config: Config, arguments: Arguments):
        """Raise UserError if NANOCHAT_DIR names no checkout, or if torch has no such device."""
        import torch

        self.device, self.attention = arguments.device, "torch's scaled_dot_product_attention"
        if arguments.fp8 and self.device == "cpu":
            raise UserError("--fp8 needs a GPU: give --device=cuda")
        if self.device == "cuda":
            if not torch.cuda.is_available():
                raise UserError("--device=cuda: torch finds no GPU here; use --device=cpu")
            torch.set_float32_matmul_precision("high")  # as nanochat does
        dtype = "bfloat16" if self.device == "cuda" else "float32"
        new = partial(new_network, length=config.batch.sequence_length, dtype=dtype, compiled=True)
        torch.manual_seed(config.seed)
        self.network = new(config.model).to(self.device)
        with torch.device("meta"):
            reference = new(network_of_depth(config.model, REFERENCE_DEPTH))
        if self.device == "cuda":
            self.attention, function = fastest_attention()
            use_attention(function)
        LOGGER.info("nanochat attends with %s", self.attention)
        if arguments.fp8:
            multiply_in_fp8(self.network)
        size = lambda net: sum(net.num_scaling_params()[part] for part in ("transformer_matrices", "lm_head"))
        options = scaled(size(self.network), size(reference), config.batch.tokens_per_step)
        options |= {name: rate * arguments.rate_factor for name, rate in options.items() if name.endswith("_lr")}
        self.decay, self.schedules = options["weight_decay"], Schedules(config.steps)
        self.optimizer = self.network.setup_optimizer(**options)
        self.compiled = torch.compile(self.network, dynamic=False)

    def step(self, step: int, batch: dict[str, Any]) -> None:
        """Take the step after `step` steps."""
        for inputs, targets, weights in micro_batches(batch, self.device):
            loss = self.compiled(inputs, targets.masked_fill(weights == 0, -1))
            (loss / len(batch["inputs"])).backward()
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * self.schedules.rate(step)
            if group["kind"] == "muon":
                group["momentum"] = self.schedules.momentum(step)
                group["weight_decay"] = self.decay * self.schedules.decay(step)
        self.optimizer.step()
        self.network.zero_grad(set_to_none=True)

    def compile(self, batch: dict[str, Any]) -> None:
        """Compile everything by a step that is undone."""
        state = deepcopy(self.network.state_dict())
        self.step(0, batch)
        self.network.load_state_dict(state)
        self.optimizer.state.clear()

    def facts(self) -> dict[str, Any]:
        """Return what was used, for the record."""
        import torch
        from nanochat.common import COMPUTE_DTYPE  # pyright: ignore[reportMissingImports]

        device = torch.cuda.get_device_name() if self.device == "cuda" else "cpu"
        parameters = sum(parameter.numel() for parameter in self.network.parameters())
        facts = {"device": device, "torch": torch.__version__, "dtype": str(COMPUTE_DTYPE).removeprefix("torch.")}
        return facts | {"attention": self.attention, "parameters": parameters}

    def wait(self) -> None:
        """Return when the device has done everything."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()


def train(config: Config, arguments: Arguments) -> dict[str, Any]:
    """Train, and write metrics.jsonl. Return its last line, with what was used. UserError for a folder that has a
    run, and as `Trainer` and `open_text_of_run` raise it."""
    require_steps(config)
    metrics = Path(arguments.out) / "metrics.jsonl"
    if is_there(metrics):
        raise UserError(f"{metrics} is of an earlier run; give another --out")
    if config.batch.rows_per_device == "auto":
        config = with_options(config, {"batch.rows_per_device": 32})  # nanochat's default
    trainer = Trainer(config, arguments)
    built, text = open_text_of_run(config, RunFolder(config.run_dir))
    evaluator = Evaluator(built, text)
    source = TextSource(built, text, evaluator, ResumePoint(built.abstract_state))
    trainer.compile(source.step_batches[0])
    metrics.parent.mkdir(parents=True, exist_ok=True)
    sums: Any = lambda _, batch: summed(trainer.network, batch, arguments.device)
    timeline = Timeline()
    line: dict[str, Any] = {}

    def evaluated(step: int) -> dict[str, Any]:
        """Write the bits per byte after `step`, and return its line."""
        trainer.wait()
        seconds = round(timeline.seconds("steps"), 3)
        with timeline.during("evaluation"), metrics.open("a") as file:
            bits = evaluate(sums, {}, evaluator.batches, evaluator.text_bytes)["val_bpb"]
            line = {"step": step, "tokens": step * config.batch.tokens_per_step, "seconds": seconds, "val_bpb": bits}
            file.write(f"{json.dumps(line)}\n")
            LOGGER.info("step {step}: {val_bpb:.4f} bits per byte, {seconds:.1f} s of training".format(**line))
        return line

    with timeline.during("steps"):
        for step, batch in zip(range(config.steps + 1), source.batches):
            if step % config.eval.every_steps == 0 or step == config.steps:
                line = evaluated(step)
            if step < config.steps:
                trainer.step(step, batch)
    result = line | {"tokens_per_second": int(line["tokens"] / line["seconds"])} | trainer.facts()
    write_whole(metrics.with_name("summary.json"), json.dumps(result, indent=2))
    return result


def main() -> int:
    config, arguments = parse(__doc__, Arguments)
    jax.config.update("jax_platforms", "cpu")
    start_jax()
    print(json.dumps(train(config, arguments)))
    return 0


if __name__ == "__main__":
    run_command(main)
