"""What a step holds on a device, by part, in closed form. docs/planning.md says how wrong it has been.

What follows from the code is counted from the shapes: parameters, moments, the batch, what is gathered, summed, kept.
What a compiler adds (`temporaries`) is a rule for each platform, chosen with a few compiled programs in view.
"""

from math import prod

from tools.plan.candidate import Candidate

PARTS = "parameters", "moments", "batch", "gathered copies", "gradient sums", "activations", "logits", "temporaries"


def memory(of: Candidate) -> dict[str, float]:
    """Bytes on a device, by part."""
    parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    muon, sizes, width = of.config.optimizer.matrices.kind == "muon", of.sizes, of.bytes_of_type
    gathered = scattered = 0.0
    for p, count in of.kinds:
        named = {axis for axis in p.axes if axis}
        replica = count * p.size / prod(sizes[axis] for axis in named)  # whole over `data`
        share = count * of.share(p.shape, p.axes)
        second = share
        if muon and p.group == "matrices":
            inputs, outputs = p.shape
            rows = outputs < inputs
            second = count * of.share(
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
    micro_batches, rows, length = of.step
    model, tokens = of.config.model, of.tokens
    of_batch = 4 if of.config.data.mask_documents else 3
    parts["batch"] = 4.0 * of_batch * micro_batches * rows * length
    parts["logits"] = width * tokens / model.loss_chunks * model.vocab_size / sizes["tensor"]
    kept, block = kept_widths(of)
    depth, unit = model.depth, width * tokens
    parts["activations"] = unit * (depth * kept + model.width)
    again = unit * (block - kept) if model.remat != "none" else 0.0
    head = 4 * model.width * model.vocab_size / sizes["tensor"]  # its gradient in float32
    stream = 2 * unit * model.width  # the residual stream's gradient, as a block reads and makes it
    if of.machine.gpu:
        if model.remat == "block":
            again += unit * 4 * model.width / sizes["tensor"]  # the gradient of its MLP
        # A block's activations, as they are computed again, are not there at the same time as the head's logits.
        parts["temporaries"] = max(head, again - parts["logits"]) + stream
        if sizes["fsdp"] == 1:
            parts["temporaries"] += max(0.0, waiting(of, kept, again) - parts["activations"] - parts["logits"])
        elif model.remat == "none":
            parts["temporaries"] += gathered
        else:
            # In the last block of the backward pass gradients that wait to be scattered, whole, are there in place of
            # activations: all but that of the embedding.
            end = again + scattered + stream - parts["activations"] - parts["logits"]
            largest = width * max(p.size for p, _ in of.kinds if p.product) / sizes["tensor"]
            parts["temporaries"] = max(parts["temporaries"], end) + 2 * largest
    else:
        # What attention keeps of its softmaxes in float32, a number a head and token over 128 lanes.
        softmaxes = 4 * 128 * tokens * model.heads / sizes["tensor"]
        # The logits' gradient lies beside them where it is not made within the products that read it: where memory is
        # fast beside the vector units (v5p, v6e), and they are small enough, and at most halved.
        small = sizes["tensor"] <= 2 and parts["logits"] * sizes["tensor"] ** 2 < 2**31
        apart = small and of.machine.bandwidth > 0.65 * of.machine.vector
        beside = parts["logits"] if apart else 0.0
        sums = parts["gradient sums"] if micro_batches > 1 else 0.0  # as the scan had them before, and has them now
        if model.remat == "block":  # the head's backward pass, or that of a block, without logits
            gathered_head = width * model.width * model.vocab_size / sizes["tensor"] if sizes["fsdp"] > 1 else 0.0
            most = max(beside + sums + head + gathered_head, again - parts["logits"])
            parts["temporaries"] = most + stream + softmaxes + gathered / depth
        else:
            parts["activations"] += depth * softmaxes
            parts["temporaries"] = gathered + stream + beside + sums
            if model.remat == "products":
                parts["temporaries"] += head + again
            elif sizes["fsdp"] > 1 and of.machine.cores == 1:  # v5e, v6e: more than lives at once
                parts["temporaries"] += gathered + head
        if of.gathers_by_sums:  # what is summed, zeros but for a share, beside what is gathered: seen in three programs
            parts["temporaries"] += 0.75 * gathered
    return parts


def kept_widths(of: Candidate) -> tuple[float, float]:
    """Channels a token and block that are kept for the backward pass, and those of a block as it is computed again."""
    model, tensor = of.config.model, of.sizes["tensor"]
    queries, keys = model.heads * model.head_dim / tensor, max(1, model.kv_heads / tensor) * model.head_dim
    values = keys / 2 if model.value_embeddings else 0  # every other block
    mixed = model.width if model.resid_lambdas or model.x0_lambdas else 0
    # The two norms' results, queries, keys, values, what attention gives, and the MLP's.
    whole = 2 * model.width + 2 * queries + 2 * keys + values + 4 * model.width / tensor
    if not of.machine.gpu:  # splash attention reads queries and keys heads first, the norms' backward pass rows first
        whole += queries + keys
    if model.remat == "none":
        return whole + mixed, whole
    if model.remat == "products":  # all but the MLP's hidden layer; and rows first alone
        return 2 * model.width + 2 * queries + 2 * keys + values + mixed, whole + 4 * model.width / tensor
    if not of.machine.gpu:  # seen in a program: beside the block the gradient of its MLP, and both products in float32
        whole += 4 * model.width / tensor + 2 * (queries + keys) + mixed
    # Read in programs for GPUs: what attention and MLP add is kept, both, in place of their sum with the block's input.
    return model.width + (2 if of.machine.gpu else 1) * mixed, whole


def waiting(of: Candidate, kept: float, again: float) -> float:
    """Bytes of activations and logits on a GPU, without `fsdp`, where products of weight gradients wait while the
    backward pass goes on; 0 where none does.

    XLA takes, as far as programs tell, the first of its orders that it thinks needs least. Counting the head's logits
    twice, beside their gradient, it lets all of these products wait, the head's among them, where what they read is
    not more than that; where blocks are computed again, none; nor with `tensor`, whose sums have products beside each
    of them. With `fsdp` the step does not leave it to XLA (`model.parallel.order_gradients`).
    """
    model, unit = of.config.model, of.bytes_of_type * of.tokens
    if model.remat == "block" or of.sizes["tensor"] > 1:
        return 0.0
    logits = unit * model.vocab_size / model.loss_chunks
    held = unit * (model.depth * read_by_weight_gradients(of) + model.width)
    held += logits if model.loss_chunks == 1 else 0.0
    return held if held <= unit * (model.depth * kept + model.width) + 2 * logits + again else 0.0


def read_by_weight_gradients(of: Candidate) -> float:
    """Channels a token and block that the products of weight gradients read: inputs, and gradients of outputs."""
    model, tensor = of.config.model, of.sizes["tensor"]
    queries, keys = model.heads * model.head_dim / tensor, max(1, model.kv_heads / tensor) * model.head_dim
    values = keys / 2 if model.value_embeddings else 0  # every other block
    mixed = model.width if model.resid_lambdas or model.x0_lambdas else 0
    inputs = 2 * model.width + queries + 4 * model.width / tensor + values + mixed
    return inputs + queries + 2 * keys + 2 * model.width + 4 * model.width / tensor
