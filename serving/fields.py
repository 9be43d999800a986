"""What becomes of the fields of a request that clients send and this server has no use for.

A field that changes no answer is ignored. A field that would change the answer is refused by name, unless its value
asks for nothing.
"""

from typing import Any

import msgspec

WHATEVER = ...
"""The field changes no answer, whatever its value."""

UNUSED: dict[str, tuple[Any, ...]] = {
    # For the provider's accounts, caches and speed.
    "user": (WHATEVER,),
    "metadata": (WHATEVER,),
    "store": (WHATEVER,),
    "service_tier": (WHATEVER,),
    "safety_identifier": (WHATEVER,),
    "prompt_cache_key": (WHATEVER,),
    "prompt_cache_options": (WHATEVER,),
    "prompt_cache_retention": (WHATEVER,),
    "prediction": (WHATEVER,),
    # Without tools.
    "parallel_tool_calls": (WHATEVER,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    # How to draw tokens.
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    # How many answers, and what they have.
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    # A network that does not reason, and writes as long as it learned.
    "reasoning_effort": ("none", "minimal"),
    "verbosity": ("medium",),
    "chat_template_kwargs": ({}, {"enable_thinking": False}),
}


def used(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields without those that are null or ask for nothing."""
    return {name: value for name, value in fields.items() if value is not None and not _asks_for_nothing(name, value)}


def _asks_for_nothing(name: str, value: Any) -> bool:
    values = UNUSED.get(name, ())
    if WHATEVER in values:
        return True
    # JSON's false is not 0: `logprobs` may be either.
    return any(value == nothing and isinstance(value, bool) == isinstance(nothing, bool) for nothing in values)


def advice(name: str) -> str:
    """Return what to give in place of a field's value, in words."""
    values = [msgspec.json.encode(value).decode() for value in UNUSED.get(name, ())]
    return "".join(f"give {value} or " for value in values) + "leave it out"
