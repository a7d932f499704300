"""How an adapter is refused."""

from __future__ import annotations

from engine_core.errors import AdapterError

_MAX_QUOTED = 120
# Others' messages quote without end.
_MAX_MESSAGE_CHARS = 1000


def invalid_adapter(message: str) -> AdapterError:
    """What stands in its directory is not what can be computed."""
    return AdapterError(_cut(message, _MAX_MESSAGE_CHARS), "invalid_adapter", "lora_path")


def trained_on(base_model: str | None) -> str:
    """How a message ends that another model may explain; empty where the adapter does not say which."""
    return f"; it was trained on {quoted(base_model)}" if base_model else ""


def quoted(value: object) -> str:
    """A name or setting somebody else wrote, for a message: on one line, and not the whole of a long one."""
    try:
        return _cut(ascii(value), _MAX_QUOTED)
    except RecursionError:  # JSON may be read that is too deep to be written
        return "…"


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[:max_chars] + "…"
