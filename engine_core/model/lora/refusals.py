"""How an adapter is refused."""

from __future__ import annotations

from engine_core.errors import AdapterError

_MAX_QUOTED = 120


def invalid_adapter(message: str) -> AdapterError:
    """What stands in its directory is not what can be computed."""
    return AdapterError(message, "invalid_adapter", "lora_path")


def trained_on(base_model: str | None) -> str:
    """How a message ends that another model may explain; empty where the adapter does not say which."""
    return f"; it was trained on {quoted(base_model)}" if base_model else ""


def quoted(value: object) -> str:
    """A name or setting somebody else wrote, for a message: on one line, and not the whole of a long one."""
    text = ascii(value)
    return text if len(text) <= _MAX_QUOTED else text[:_MAX_QUOTED] + "…"
