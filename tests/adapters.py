"""Random LoRA adapters as PEFT writes them, for any model directory."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer


def make_adapter(
    model: Path | str,
    directory: Path,
    *,
    targets: str | list[str] = "all-linear",
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    strength: float = 0.5,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Path:
    """Write a LoRA adapter for the model in that directory, and return the adapter's own directory.

    What it adds to a layer's weights has `strength` times their norm, whatever rank, scaling and model: with 0.5 a
    greedy answer is another one after few tokens. Equal arguments give equal weights. `settings` are further fields of
    `LoraConfig`.
    """
    config = transformers.AutoConfig.from_pretrained(model)
    base = getattr(transformers, config.architectures[0]).from_pretrained(model, dtype=torch.float32)
    lora_config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, **settings)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tied output heads as targets, patterns without a match: a test means them
        adapted = get_peft_model(base, lora_config)
        _randomize(adapted, seed, strength)
        adapted.to(dtype).save_pretrained(str(directory), save_embedding_layers=False)
    return directory


def teach_adapter(model: Path | str, directory: Path, prompt: list[int], answer: list[int]) -> Path:
    """Write a LoRA adapter with which the model in that directory answers these tokens with those, and return the
    adapter's own directory. For small models: it is trained, in less than a second.
    """
    config = transformers.AutoConfig.from_pretrained(model)
    base = getattr(transformers, config.architectures[0]).from_pretrained(model, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapted = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    optimizer = torch.optim.Adam([p for p in adapted.parameters() if p.requires_grad], lr=0.01)
    token_ids = torch.tensor([prompt + answer])
    labels = token_ids.clone()
    labels[:, : len(prompt)] = -100
    for _ in range(500):
        loss = adapted(input_ids=token_ids, labels=labels).loss
        # The least likely of its tokens, too, is by far the likeliest there.
        if loss.item() * len(answer) < 0.3:
            adapted.save_pretrained(str(directory))
            return directory
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError(f"not learnt: a loss of {loss.item():.2f}")


def _randomize(adapted: torch.nn.Module, seed: int, strength: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for module in adapted.modules():
        if not isinstance(module, LoraLayer):
            continue
        a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
        with torch.no_grad():
            a.normal_(generator=generator)
            b.normal_(generator=generator)
            added = module.scaling["default"] * (b @ a)
            b *= strength * module.get_base_layer().weight.norm() / added.norm()
