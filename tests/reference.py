"""Compute the network, its loss and AdamW in float64, for the complete batch at once, by plain automatic
differentiation. Nothing of the project's own mathematics is used, so that the two can be compared."""

import jax
import jax.numpy as jnp
import numpy as np

from options.schema import Config, ModelConfig


def logits(params: dict, tokens, config: ModelConfig):
    """Return capped logits [batch, length, vocab]."""

    def norm(x):
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)

    def turn(x):  # [batch, length, heads, head_dim], as complex numbers of the two halves
        half = config.head_dim // 2
        rate = config.rotary_base ** (-2 * jnp.arange(half) / config.head_dim)
        turned = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(-1j * jnp.outer(jnp.arange(x.shape[1]), rate))[:, None]
        return jnp.concatenate([turned.real, turned.imag], -1)

    batch, length = tokens.shape
    back = jnp.arange(length)[:, None] - jnp.arange(length)
    x = norm(params["embed"]["table"][tokens])
    if config.smear:
        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        gate = 1 / (1 + jnp.exp(-x[..., :24] @ params["smear_gate"]["kernel"]))
        x = x + params["smear_lambda"]["values"] * gate * before
    first = x
    for i, block in enumerate(params["blocks"].values()):
        if config.resid_lambdas:
            x = params["resid_lambdas"]["values"][i] * x
        if config.x0_lambdas:
            x = x + params["x0_lambdas"]["values"][i] * first
        short = i < config.depth - 1 and (config.window_pattern * config.depth)[i] == "S"
        causal = (back >= 0) & (back <= (config.short_window if short else length))
        attention = {name: matrix["kernel"] for name, matrix in block["attention"].items() if "kernel" in matrix}
        y = norm(x)
        split = lambda z: z.reshape(batch, length, -1, config.head_dim)
        q, k = (norm(turn(split(y @ attention[name]))) * config.qk_scale for name in ("query", "key"))
        v = split(y @ attention["value"])
        if config.value_embeddings and (config.depth - 1 - i) % config.value_embedding_every == 0:
            seen = y[..., : config.value_gate_channels]
            gate = config.value_gate_limit / (1 + jnp.exp(-seen @ attention["value_gate"]))
            v = v + gate[..., None] * split(block["attention"]["value_embedding"]["table"][tokens])
        group = config.heads // config.kv_heads
        k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(config.head_dim)
        shares = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(batch, length, -1) @ attention["out"]
        mlp = {name: matrix["kernel"] for name, matrix in block["mlp"].items()}
        x = x + jnp.maximum(norm(x) @ mlp["up"], 0) ** 2 @ mlp["down"]
        middle = x if i == config.depth // 2 else middle if i else x
    if config.backout:
        x = x - params["backout_lambda"]["values"] * middle
    return config.softcap * jnp.tanh(norm(x) @ params["lm_head"]["kernel"] / config.softcap)


def mean_loss(params: dict, rows: dict, config: ModelConfig):
    """Return the nats per valid token over all rows [batch, length]."""
    log_probabilities = jax.nn.log_softmax(logits(params, rows["inputs"], config), axis=-1)
    nats = -jnp.take_along_axis(log_probabilities, rows["targets"][..., None], -1)[..., 0]
    return jnp.sum(rows["weights"] * nats) / jnp.sum(rows["weights"] != 0)


_value_and_gradient = jax.jit(jax.value_and_grad(mean_loss), static_argnums=2)


def train(params: dict, batches: list[dict], config: Config, rates) -> tuple[dict, list[dict]]:
    """Return the parameters after a step on each of `batches` (arrays [K, B, T] of any split), and each step's loss and
    norm. `rates(step)` returns each group's learning rate."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
        first = second = jax.tree.map(np.zeros_like, params)
        metrics = []
        for step, batch in enumerate(batches):
            rows = {name: jnp.asarray(array).reshape(-1, array.shape[-1]) for name, array in batch.items()}
            loss, gradient = jax.device_get(_value_and_gradient(params, rows, config.model))
            norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradient)))
            clip = np.minimum(1, config.optimizer.clip_norm / norm)
            gradient = jax.tree.map(lambda g, clip=clip: g * clip, gradient)

            def update(path, p, m, v, g, step=step):
                name = path[0].key if path[0].key != "blocks" else "matrices"
                if path[-2].key == "value_embedding":
                    name = "value_embeds"
                name = "scalars" if name in ("smear_gate", "smear_lambda", "backout_lambda") else name
                group, rate = getattr(config.optimizer, name), rates(step)[name]
                m = group.beta1 * m + (1 - group.beta1) * g
                v = group.beta2 * v + (1 - group.beta2) * g**2
                direction = m / (1 - group.beta1 ** (step + 1))
                direction /= np.sqrt(v / (1 - group.beta2 ** (step + 1))) + group.eps
                return p - rate * (direction + group.weight_decay * p), m, v

            updated = jax.tree_util.tree_map_with_path(update, params, first, second, gradient)
            params, first, second = jax.tree.transpose(
                jax.tree.structure(params), jax.tree.structure((0, 0, 0)), updated
            )
            metrics.append({"loss": float(loss), "grad_norm": float(norm)})
        return params, metrics
