"""Valid JSON bodies made invalid, or strange: for fuzzing HTTP APIs."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308),
    *("", "x" * 40, "\ud7ff\x00", "user", "text", "ephemeral", "image", "tool_use", "messages[0]"),
    *([], {}, [[]], [None], {"type": "text"}, {"type": []}, {"": 0}),
)


def mutate_json(body: Any, rng: random.Random) -> bytes:
    """A damaged copy of `body`, as a client might send it; now and then it is still a valid one."""
    changed = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        changed = _with_change(changed, rng)
    data = json.dumps(changed, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    return _with_changed_bytes(data, rng) if rng.random() < 0.15 else data


def _with_change(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        place: Any = rng.choice(places)
        action = rng.randrange(8)
        if action == 0:
            del value[place]
        elif action == 1 and isinstance(value, dict):
            value[rng.choice(("", "type", "unknown", *places))] = value.pop(place)
        elif action == 1:
            value.insert(place, copy.deepcopy(value[place]))
        elif action == 2 and isinstance(value, list):
            value += [copy.deepcopy(value[place])] * rng.choice((1, 50))
        else:
            value[place] = _with_change(value[place], rng)
        return value
    action = rng.randrange(6)
    if action == 0:
        return [value] * rng.randint(0, 3)
    if action == 1:
        return {"type": value}
    if action == 2 and isinstance(value, str):
        return value[: rng.randrange(len(value) + 1)] + rng.choice(("", "\x00", "<|im_end|>", "\ud83d\ude00", "}"))
    return copy.deepcopy(rng.choice(_VALUES))


def _with_changed_bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed[: rng.randint(0, len(changed))] if rng.random() < 0.3 else changed)
