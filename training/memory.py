"""Memory of a step, evaluation and sampling on a device, in closed form. docs/planning.md has its errors.

Parameters, moments, the batch, and gathered, summed and kept arrays are counted from shapes. A
compiler's additions (`temporaries`) follow a rule for each platform, chosen to match compiled programs.
"""

from math import ceil, prod

from training.candidate import Candidate

PARTS = "parameters", "moments", "batch", "gathered copies", "gradient sums", "activations", "logits", "temporaries"
OF_PARAMETERS = "parameters", "moments", "gathered copies", "gradient sums"
DRAWING = 4
"""Arrays [rows, vocabulary] in float32 that drawing a token needs: logits, truncated logits, noise, and their sum."""


def memory(candidate: Candidate) -> dict[str, float]:
    """Return a step's bytes on a device, by part."""
    parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    muon, sizes, width = candidate.config.optimizer.matrices.kind == "muon", candidate.sizes, candidate.bytes_of_type
    gathered = scattered = 0.0
    for p, count in candidate.kinds:
        named = {axis for axis in p.axes if axis}
        replica = count * p.size / prod(sizes[axis] for axis in named)  # not divided over `data`
        share = count * candidate.share(p.shape, p.axes)
        second = share
        if muon and p.group == "matrices":
            inputs, outputs = p.shape
            rows = outputs < inputs
            second = count * candidate.share(
                (inputs, 1) if rows else (1, outputs), (p.axes[0], None) if rows else (None, p.axes[1])
            )
        parts["parameters"] += 4 * share
        parts["moments"] += 4 * (share + second)
        parts["gathered copies"] += (4 if len(p.shape) == 1 else width) * replica
        parts["gradient sums"] += 4 * replica
        if sizes["fsdp"] > 1 and p.product and p.group != "lm_head":
            gathered += width * replica * sizes["fsdp"]
        if p.group != "embed":
            scattered += 4 * replica * (sizes["fsdp"] if "fsdp" in named else 1)
    micro_batches, rows, length = candidate.step
    model, tokens = candidate.config.model, candidate.tokens
    of_batch = 4 if candidate.config.data.mask_documents else 3
    parts["batch"] = 4.0 * of_batch * micro_batches * rows * length
    parts["logits"] = width * tokens / model.loss_chunks * model.vocab_size / sizes["tensor"]
    kept, block = kept_widths(candidate)
    depth, unit = model.depth, width * tokens
    parts["activations"] = unit * (depth * kept + model.width)
    again = unit * (block - kept) if model.remat != "none" else 0.0
    head = 4 * model.width * model.vocab_size / sizes["tensor"]  # its gradient in float32
    stream = 2 * unit * model.width  # the residual stream's gradient, as a block reads and makes it
    if candidate.machine.gpu:
        if model.remat == "block":
            again += unit * 4 * model.width / sizes["tensor"]  # the gradient of its MLP
        # A recomputed block's activations are not in memory at the same time as the head's logits.
        parts["temporaries"] = max(head, again - parts["logits"]) + stream
        if sizes["fsdp"] == 1:
            parts["temporaries"] += max(0.0, waiting(candidate, kept, again) - parts["activations"] - parts["logits"])
        elif model.remat == "none":
            parts["temporaries"] += gathered
        else:
            # In the last block of the backward pass complete gradients wait to be scattered, of all but the embedding.
            # Activations are freed by then.
            end = again + scattered + stream - parts["activations"] - parts["logits"]
            largest = width * max(p.size for p, _ in candidate.kinds if p.product) / sizes["tensor"]
            parts["temporaries"] = max(parts["temporaries"], end) + 2 * largest
    else:
        # Attention's softmax statistics in float32: a number per head and token over 128 lanes.
        softmaxes = 4 * 128 * tokens * model.heads / sizes["tensor"]
        # Logits and their gradient are in memory together if the products that read it do not make it. They do not if
        # memory is fast relative to the vector units (v5p, v6e), and the logits are small and at most halved.
        small = sizes["tensor"] <= 2 and parts["logits"] * sizes["tensor"] ** 2 < 2**31
        apart = small and candidate.machine.bandwidth > 0.65 * candidate.machine.vector
        alive = parts["logits"] if apart else 0.0
        # The sums before and after an iteration of the scan.
        sums = parts["gradient sums"] if micro_batches > 1 else 0.0
        if model.remat == "block":  # the head's backward pass, or a block's, without logits
            gathered_head = width * model.width * model.vocab_size / sizes["tensor"] if sizes["fsdp"] > 1 else 0.0
            most = max(alive + sums + head + gathered_head, again - parts["logits"])
            parts["temporaries"] = most + stream + softmaxes + gathered / depth
        else:
            parts["activations"] += depth * softmaxes
            parts["temporaries"] = gathered + stream + alive + sums
            if model.remat == "products":
                parts["temporaries"] += head + again
            elif sizes["fsdp"] > 1 and candidate.machine.cores == 1:  # v5e, v6e: more than is live at once
                parts["temporaries"] += gathered + head
        if candidate.gathers_by_sums:  # zeros for all but the device's share (three programs)
            parts["temporaries"] += 0.75 * gathered
    return parts


def kept_widths(candidate: Candidate) -> tuple[float, float]:
    """Return the channels a token and block that are kept for the backward pass, and those of a recomputed block."""
    model, tensor = candidate.config.model, candidate.sizes["tensor"]
    queries, keys = model.heads * model.head_dim / tensor, max(1, model.kv_heads / tensor) * model.head_dim
    values = keys / 2 if model.value_embeddings else 0  # every other block
    mixed = model.width if model.resid_lambdas or model.x0_lambdas else 0
    # The two norms' results, queries, keys, values, what attention gives, and the MLP's.
    whole = 2 * model.width + 2 * queries + 2 * keys + values + 4 * model.width / tensor
    if model.dropout:
        whole += 2 * model.width / candidate.bytes_of_type  # two masks of bytes
    gpu = candidate.machine.gpu
    if not gpu:  # splash attention reads queries and keys heads first; the norms' backward pass, rows first
        whole += queries + keys
    if model.remat == "none":
        return whole + mixed, whole
    if model.remat == "products":  # all but the MLP's hidden layer; queries and keys rows first only
        return 2 * model.width + 2 * queries + 2 * keys + values + mixed, whole + 4 * model.width / tensor
    if not gpu:  # seen in a program: also the gradient of the block's MLP, and queries and keys in float32
        whole += 4 * model.width / tensor + 2 * (queries + keys) + mixed
    # Read in programs for GPUs: attention's and the MLP's outputs are both kept, not their sum with the block's input.
    return 1.0 * model.width + (2 if gpu else 1) * mixed, whole


def waiting(candidate: Candidate, kept: float, again: float) -> float:
    """Return bytes of activations and logits on a GPU, without `fsdp`, if products of weight gradients wait during the
    backward pass; 0 if none waits.

    As far as programs show, XLA takes the first of its orders that needs least by its own count. That counts the head's
    logits twice, and their gradient. If what these products read is not more, all of them wait, the head's too. None
    waits if blocks are recomputed, or with `tensor`, whose sums alternate with products. With `fsdp` the step does not
    leave it to XLA (`model.parallel.order_gradients`).
    """
    model, unit = candidate.config.model, candidate.bytes_of_type * candidate.tokens
    if model.remat == "block" or candidate.sizes["tensor"] > 1:
        return 0.0
    logits = unit * model.vocab_size / model.loss_chunks
    operands = unit * (model.depth * read_by_weight_gradients(candidate) + model.width)
    operands += logits if model.loss_chunks == 1 else 0.0
    return operands if operands <= unit * (model.depth * kept + model.width) + 2 * logits + again else 0.0


def read_by_weight_gradients(candidate: Candidate) -> float:
    """Return the channels a token and block that products of weight gradients read: inputs, and gradients of
    outputs."""
    model, tensor = candidate.config.model, candidate.sizes["tensor"]
    queries, keys = model.heads * model.head_dim / tensor, max(1, model.kv_heads / tensor) * model.head_dim
    values = keys / 2 if model.value_embeddings else 0  # every other block
    mixed = model.width if model.resid_lambdas or model.x0_lambdas else 0
    inputs = 2 * model.width + queries + 4 * model.width / tensor + values + mixed
    return inputs + queries + 2 * keys + 2 * model.width + 4 * model.width / tensor


def evaluation_memory(candidate: Candidate, step: dict[str, float]) -> dict[str, float]:
    """Return bytes on a device: `held-out rows`, which stay there; and everything during an `evaluation` and during
    `sampling`. `step`: `memory(candidate)`."""
    config, (micro_batches, rows, length), sizes = candidate.config, candidate.step, candidate.sizes
    model, width = config.model, candidate.bytes_of_type
    of_batch = step["batch"]
    whole = micro_batches * rows * length * sizes["data"] * sizes["fsdp"]
    held_out = ceil(config.eval.tokens / whole) * of_batch
    state = step["parameters"] + step["moments"] + held_out + step["gathered copies"]
    # A block at a time and the residual stream; then the logits. Nothing is kept, so nothing is recomputed.
    block = kept_widths(candidate)[1]
    logits = model.vocab_size / model.loss_chunks / sizes["tensor"]
    forward = width * candidate.tokens * (max(block, logits) + model.width)
    prompts, positions = len(config.eval.prompts), min(length, config.eval.sample_tokens + 1)
    cache = 2 * model.depth * prompts * positions * max(1, model.kv_heads / sizes["tensor"]) * model.head_dim * width
    return {
        "held-out rows": held_out,
        "evaluation": state + forward,
        "sampling": state + cache + DRAWING * 4 * prompts * model.vocab_size,
    }


def most(step: float | int, evaluation: dict[str, float]) -> float:
    """Return the bytes a device needs, from a step's bytes and `evaluation_memory`."""
    held_out, *others = evaluation.values()
    return max(step + held_out, *others)


def most_rows(candidate: Candidate, limit: float, scale: float = 1.0) -> int:
    """Return the most rows_per_device of which a device needs at most `limit` bytes, by closed form; 0: none."""
    fit = lambda rows: device_bytes(candidate.having({"batch.rows_per_device": rows}), scale) <= limit
    return next(filter(fit, candidate.row_counts), 0)


def with_rows(candidate: Candidate, limit: float) -> Candidate:
    """Return the candidate with a number in place of `rows_per_device=auto`: `most_rows`, or 1 if none fits."""
    if candidate.config.batch.rows_per_device != "auto":
        return candidate
    return candidate.having({"batch.rows_per_device": most_rows(candidate, limit) or 1})


def device_bytes(candidate: Candidate, scale: float = 1.0) -> float:
    """Return the bytes a device needs, by closed form. `scale` multiplies what is there for a micro-batch's rows."""
    step = memory(candidate)
    fixed = sum(step[part] for part in OF_PARAMETERS)
    return fixed + scale * (most(sum(step.values()), evaluation_memory(candidate, step)) - fixed)


def scale_of(candidate: Candidate, needs: float) -> float:
    """Return the `scale` by which `device_bytes` are those that a compiled program `needs`."""
    fixed = device_bytes(candidate, 0.0)
    return max(needs - fixed, 0.0) / (device_bytes(candidate) - fixed)
