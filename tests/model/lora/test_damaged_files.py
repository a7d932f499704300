"""However a file is damaged: it is read, or refused as an adapter. Nothing else is raised, nothing hangs."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_core.errors import AdapterError
from engine_core.model.lora.adapter_tensors import AdapterTensors
from engine_core.model.lora.read_adapter import read_adapter_tensors
from tests.json_mutations import mutate_json
from tests.model.lora.adapter_files import CONFIG, MAX_RANK, WEIGHTS, bare_model, linear_layers

NUM_DAMAGED = 300


def _damaged_bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    if rng.random() < 0.3:
        del changed[rng.randrange(len(changed)) :]
    if rng.random() < 0.2:
        changed += rng.randbytes(rng.randint(1, 40))
    for _ in range(rng.randint(1, 6)):
        # Mostly where the structure is.
        at = rng.randrange(min(len(changed), 2000) if rng.random() < 0.8 else len(changed)) if changed else 0
        changed[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
    return bytes(changed)


def _damaged_settings(data: bytes, rng: random.Random) -> bytes:
    return mutate_json(json.loads(data), rng) if rng.random() < 0.7 else _damaged_bytes(data, rng)


def _damaged_weights(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return _damaged_bytes(data, rng)
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = mutate_json(json.loads(data[8:end]), rng)
    return struct.pack("<Q", len(header)) + header + data[end:]


@pytest.mark.parametrize(("name", "damage"), [(CONFIG, _damaged_settings), (WEIGHTS, _damaged_weights)])
def test_damaged_files_are_read_or_refused(
    llama: Path, adapter: Path, name: str, damage: Callable[[bytes, random.Random], bytes]
) -> None:
    modules = linear_layers(bare_model(llama))
    whole = (adapter / name).read_bytes()
    rng = random.Random(name)
    refusals: list[AdapterError] = []
    for _ in range(NUM_DAMAGED):
        (adapter / name).write_bytes(damage(whole, rng))
        try:
            found = read_adapter_tensors(adapter, adapter, modules, MAX_RANK, output_head="lm_head", pause=lambda: None)
        except AdapterError as error:
            refusals.append(error)
        else:
            _check(found)
    assert len(refusals) > NUM_DAMAGED / 2
    assert {error.reason for error in refusals} == {"invalid_adapter"}
    assert max(len(str(error)) for error in refusals) < 1000


def _check(found: AdapterTensors) -> None:
    assert len(found.digest) == 32
    for part in found.parts.values():
        assert part.a.isfinite().all() and part.b.isfinite().all() and 0 < part.scaling < 1e7
