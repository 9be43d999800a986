# pyright: reportMissingImports=false
"""The network for transformers, with all of its options: export.py copies this file next to the weights, and
`AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` reads it there.

It needs only torch and transformers, not the code that trained the network. model/gpt.py is the original. Left padding,
caches (also of a fixed size), generation with several beams and gradient checkpointing work. Several documents in a row
do not. `forward` refuses a keyword that it does not know: to ignore one would change results without a word.
"""

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE = "cache" if hasattr(CausalLMOutputWithPast, "cache") else "past_key_values"
"""The cache's name in the installed transformers: 5.24 renamed it."""
KNOWN = {"num_items_in_batch", "ignore_index", "shift_labels", "cache_position"}
"""Keywords of the loss function; and what a cache says itself."""


class TokensumConfig(PretrainedConfig):
    model_type = "tokensum"
    keys_to_ignore_at_inference = (CACHE,)

    vocab_size: int = 258
    hidden_size: int = 64
    num_hidden_layers: int = 1
    num_attention_heads: int = 1
    num_key_value_heads: int = 1
    head_dim: int = 64
    max_position_embeddings: int = 2048
    softcap: float = 15.0
    rotary_base: float = 100_000.0
    qk_scale: float = 1.0
    windows: list | tuple = ()
    """Number of earlier positions that each block sees; None: all."""
    value_embeddings: list | tuple = ()
    """Blocks with value embeddings."""
    resid_lambdas: bool = False
    x0_lambdas: bool = False
    smear: bool = False
    backout: bool = False
    smear_channels: int = 24
    value_gate_channels: int = 12
    value_gate_limit: float = 3.0

    def __post_init__(self, **kwargs):
        self.windows = self.windows or [None] * self.num_hidden_layers
        super().__post_init__(**kwargs)


def inverse_rms(x: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    return (x.float() * inverse_rms(x)).type_as(x)


def matrix(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def require_one_document(position_ids: torch.Tensor, mask: torch.Tensor | None, past: int) -> None:
    """Raise ValueError unless `position_ids` [1 or batch, length] count by one from token to token. Where they start
    changes nothing: rotary attention sees differences. `mask` [batch, past + length]: padding is not looked at."""
    steps = position_ids.diff(dim=-1)
    if mask is not None:
        there = mask[:, past:]
        steps = steps.expand(len(mask), -1)[there[:, 1:] & there[:, :-1]]
    if (steps != 1).any():
        raise ValueError("position_ids must count by one: several documents in a row are not computed")


class Attention(nn.Module):
    def __init__(self, config: TokensumConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim, self.qk_scale = layer, config.head_dim, config.qk_scale
        self.window = config.windows[layer]
        self.gate_channels, self.gate_limit = config.value_gate_channels, config.value_gate_limit
        queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.query, self.out = matrix(config.hidden_size, queries), matrix(queries, config.hidden_size)
        self.key, self.value = matrix(config.hidden_size, keys), matrix(config.hidden_size, keys)
        self.has_value_embedding = layer in config.value_embeddings
        if self.has_value_embedding:
            self.value_embedding = nn.Embedding(config.vocab_size, keys)
            self.value_gate = matrix(config.value_gate_channels, config.num_key_value_heads)

    def turned(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Rotate by the position, then normalize; in float32, rounded once."""
        cos, sin = angles
        wide = x.float()
        first, second = wide.chunk(2, dim=-1)
        y = wide * cos + torch.cat([second * sin, -first * sin], dim=-1)
        return (y * (self.qk_scale * inverse_rms(x))).type_as(x)

    def forward(
        self,
        x: torch.Tensor,
        tokens: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k = (self.turned(of(x).view(heads).transpose(1, 2), angles) for of in (self.query, self.key))
        v = self.value(x).view(heads)
        if self.has_value_embedding:
            gate = self.gate_limit * torch.sigmoid(self.value_gate(x[..., : self.gate_channels]))
            v = v + gate[..., None] * self.value_embedding(tokens).view(heads)
        v = v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer, {"cache_position": positions})  # transformers 4 needs the positions
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        if mask is None and self.window is None and k.shape[2] == q.shape[2]:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            distance = positions[:, None] - torch.arange(k.shape[2], device=x.device)
            seen = (distance >= 0) & (distance <= (k.shape[2] if self.window is None else self.window))
            if mask is not None:  # padding sees itself, so every row has a key
                there = functional.pad(mask, (0, k.shape[2] - mask.shape[1]))  # a cache of a fixed size has more keys
                seen = seen & there[:, None, None] | (distance == 0)
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class MLP(nn.Module):
    def __init__(self, config: TokensumConfig):
        super().__init__()
        self.up = matrix(config.hidden_size, 4 * config.hidden_size)
        self.down = matrix(4 * config.hidden_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.relu(self.up(x)).square())


class Block(GradientCheckpointingLayer):
    def __init__(self, config: TokensumConfig, layer: int):
        super().__init__()
        self.attention, self.mlp = Attention(config, layer), MLP(config)

    def forward(self, x: torch.Tensor, *of_attention) -> torch.Tensor:
        x = x + self.attention(rms_norm(x), *of_attention)
        return x + self.mlp(rms_norm(x))


class TokensumForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TokensumConfig
    _input_embed_layer = "embed"
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = False  # vLLM refuses: its call has no place for the token before, which smear reads
    supports_gradient_checkpointing = True

    def __init__(self, config: TokensumConfig):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList([Block(config, layer) for layer in range(config.num_hidden_layers)])
        self.lm_head = matrix(config.hidden_size, config.vocab_size)
        numbers = lambda count: nn.Parameter(torch.zeros(count))
        if config.resid_lambdas:
            self.resid_lambdas = numbers(config.num_hidden_layers)
        if config.x0_lambdas:
            self.x0_lambdas = numbers(config.num_hidden_layers)
        if config.smear:
            self.smear_gate, self.smear_lambda = matrix(config.smear_channels, 1), numbers(1)
        if config.backout:
            self.backout_lambda = numbers(1)
        self.post_init()

    def resize_token_embeddings(self, new_num_tokens=None, pad_to_multiple_of=None, mean_resizing=True) -> nn.Embedding:
        """Resize the embeddings, and the tables of value embeddings, which also have a row for each token."""
        resized = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        size = {"new_num_tokens": resized.num_embeddings, "mean_resizing": mean_resizing}
        for module in self.modules():
            if isinstance(module, Attention) and module.has_value_embedding:
                module.value_embedding = self._get_resized_embeddings(module.value_embedding, **size)
        return resized

    def create_masks_for_generate(self, attention_mask: torch.Tensor | None = None, **kwargs) -> torch.Tensor | None:
        """Return the mask [batch, length] unchanged: the blocks convert it."""
        return attention_mask

    def prepare_inputs_for_generation(self, input_ids, *args, **kwargs):
        """Return the inputs with the previous token, which `smear` reads and no cache contains."""
        prepare = super().prepare_inputs_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        inputs = prepare(input_ids, *args, **kwargs)
        cache = inputs.get(CACHE)
        past = 0 if cache is None else cache.get_seq_length()
        if self.config.smear and 0 < past < input_ids.shape[1]:  # else input_ids lacks the tokens in the cache
            inputs["previous_ids"] = input_ids[:, past - 1]
        return inputs

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        previous_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        cache: Cache | None = None,
        **kwargs,
    ):
        """Take `previous_ids` [batch]: the last tokens in the cache; a network with smear needs them with a cache.
        Positions count from the start of the text: left padding changes nothing. `cache` and `past_key_values` are
        two names of one thing. Raise TypeError for an unknown keyword, and ValueError for what is not computed."""
        config = self.config
        position_ids = kwargs.pop("position_ids", None)  # if forward named them, generate() would pass them
        given = {name for name, value in kwargs.items() if value is not None and value is not False}
        if unknown := given - KNOWN:
            raise TypeError(f"{type(self).__name__} does not know {', '.join(sorted(unknown))}")
        if attention_mask is not None and attention_mask.ndim != 2:
            raise ValueError("attention_mask must be [batch, length]")
        if cache is not None and past_key_values is not None:
            raise ValueError("cache and past_key_values are two names of one thing: pass one of them")
        cache = past_key_values if cache is None else cache
        replayed = self.blocks[0].gradient_checkpointing and self.training and torch.is_grad_enabled()
        if replayed and cache is not None:
            raise ValueError("gradient checkpointing computes each block twice, and would write twice to a cache")
        if use_cache and cache is None and not replayed:
            cache = DynamicCache()
        past = 0 if cache is None else int(cache.get_seq_length())
        positions = past + torch.arange(input_ids.shape[1], device=input_ids.device)
        mask = None if attention_mask is None else attention_mask.bool()
        if position_ids is not None:
            require_one_document(position_ids, mask, past)
        angles = self.angles(positions)
        x = rms_norm(self.embed(input_ids))
        if config.smear:
            x = self.smeared(x, past, previous_ids, mask)
        first = middle = x
        for i, block in enumerate(self.blocks):
            if config.resid_lambdas or config.x0_lambdas:
                kept = self.resid_lambdas[i].float() * x.float() if config.resid_lambdas else x
                added = self.x0_lambdas[i].float() * first.float() if config.x0_lambdas else 0
                x = (kept + added).type_as(first)
            x = block(x, input_ids, angles, positions, mask, cache)
            if i == config.num_hidden_layers // 2:
                middle = x
        if config.backout:
            x = (x.float() - self.backout_lambda.float() * middle.float()).type_as(first)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep  # 0: all
        logits = self.lm_head(rms_norm(x)[:, keep])
        logits = config.softcap * torch.tanh(logits.float() / config.softcap)
        loss = None  # kwargs has Trainer's num_items_in_batch: the mean is over all tokens of its step
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})  # pyright: ignore
        return output.to_tuple() if return_dict is False else output

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos for every channel of a head, and sin for the first of each pair."""
        size = self.config.head_dim
        frequencies = self.config.rotary_base ** (
            -torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size
        )
        angles = positions.float()[:, None] * frequencies
        return torch.cos(angles).repeat(1, 2), torch.sin(angles)

    def smeared(
        self, x: torch.Tensor, past: int, previous_ids: torch.Tensor | None, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Add the previous token's embedding, gated by the token's own."""
        if not past:
            last = torch.zeros_like(x[:, :1])
        elif previous_ids is None:
            raise ValueError(
                "a network with smear needs previous_ids, the last tokens in the cache; "
                "generate() passes them, except with prefill_chunk_size"
            )
        else:
            last = rms_norm(self.embed(previous_ids))[:, None]
        before = torch.cat([last, x[:, :-1]], dim=1)
        if mask is not None:  # padding is not a previous token
            there = functional.pad(mask, (1, 0))[:, past : past + x.shape[1]]
            before = before * there[..., None]
        gate = torch.sigmoid(self.smear_gate(x[..., : self.config.smear_channels]))
        return x + (self.smear_lambda.float() * gate.float()).type_as(x) * before
