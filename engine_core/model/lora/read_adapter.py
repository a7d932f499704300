"""PEFT directory → `AdapterTensors`: everything right for the model at hand, or a reason why not."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from kernels.lora import LoraPart
from kernels.one_thread import chunks

from .adapter_directory import WEIGHTS_NAME, open_file
from .adapter_tensors import AdapterTensors, ModuleShape
from .digest import AdapterDigest
from .module_tensors import ModuleTensors, tensors_by_module
from .peft_config import CONFIG_NAME, PeftConfig, parse_peft_config
from .refusals import invalid_adapter, quoted, trained_on
from .safetensors_file import StoredTensor, read_header, read_tensor
from .target_modules import Target, find_targets

_MAX_CONFIG_BYTES = 1_000_000


def read_adapter_tensors(
    path: Path,
    root: Path | None,
    modules: Mapping[str, ModuleShape],
    max_rank: int,
    *,
    output_head: str | None,
    pause: Callable[[], None],
) -> AdapterTensors:
    """The LoRA adapter in the directory `path`, checked to compute on this model what PEFT would compute.

    Args:
        path: has `adapter_config.json` and `adapter_model.safetensors`.
        root: where given, a relative path begins there, and the directory and both files must lie below it, links
            followed.
        modules: all `nn.Linear` of the base model by their paths in it, as transformers names them.
        max_rank: of any module.
        output_head: which of `modules` makes logits; `all-linear` leaves it out.
        pause: called after every piece of the work.

    Any thread may call this; others go on meanwhile. Weights are read once everything else was found right, so what is
    refused costs next to nothing, however large it is. Raises AdapterError.
    """
    config = parse_peft_config(_read_config(path, root))
    base_model = config.base_model_name_or_path or ""
    with open_file(path, root, WEIGHTS_NAME) as weights:
        pause()
        stored = read_header(weights, WEIGHTS_NAME)
        pause()
        names = tensors_by_module(stored, modules, WEIGHTS_NAME, base_model)
        pause()
        targets = find_targets(config, modules, output_head)
        _check_same_modules(names, targets)
        _check_called_as_now(config, names)
        pause()
        for module, target in targets.items():
            _check_shapes(stored, names[module], modules[module], target, max_rank, base_model)

        digest = AdapterDigest()
        parts = {}
        for module in sorted(targets):
            a, b = (_read_weights(weights, stored[name], name) for name in names[module][:2])
            parts[module] = LoraPart(a, b, targets[module].scaling)
            pause()
            digest.add(module, parts[module])
            pause()
    return AdapterTensors(digest.digest(), base_model, parts)


def _read_config(path: Path, root: Path | None) -> bytes:
    data = b""
    with open_file(path, root, CONFIG_NAME) as descriptor:
        try:
            # Some file systems give less than there is.
            while piece := os.pread(descriptor, _MAX_CONFIG_BYTES + 1 - len(data), len(data)):
                data += piece
        except OSError as error:
            raise invalid_adapter(f"{CONFIG_NAME} cannot be read: {error.strerror}") from None
    if len(data) > _MAX_CONFIG_BYTES:
        raise invalid_adapter(f"{CONFIG_NAME} has more than {_MAX_CONFIG_BYTES:,} bytes")
    return data


def _check_same_modules(names: Mapping[str, ModuleTensors], targets: Mapping[str, Target]) -> None:
    for module in names:
        if module not in targets:
            raise invalid_adapter(
                f"{WEIGHTS_NAME} has weights for {quoted(module)}, which the settings in {CONFIG_NAME} (target_modules "
                "and what limits them) leave out"
            )
    for module in targets:
        if module not in names:
            raise invalid_adapter(
                f"{WEIGHTS_NAME} has no weights for {quoted(module)}, which target_modules in {CONFIG_NAME} means"
            )


def _check_called_as_now(config: PeftConfig, names: Mapping[str, ModuleTensors]) -> None:
    """An old name that a pattern of scalings matched may match none now. (Of ranks the shapes would tell.)"""
    if config.alpha_pattern:
        for module, tensors in names.items():
            if tensors.called != module:
                raise invalid_adapter(
                    f"{WEIGHTS_NAME} says {quoted(tensors.called)} where this model says {quoted(module)}, so "
                    f"alpha_pattern in {CONFIG_NAME} may not mean what it did"
                )


def _check_shapes(
    stored: Mapping[str, StoredTensor],
    names: ModuleTensors,
    module: ModuleShape,
    target: Target,
    max_rank: int,
    base_model: str,
) -> None:
    if target.rank > max_rank:
        raise invalid_adapter(
            f"its rank is {target.rank} (of {quoted(names.a)}), and the engine computes at most {max_rank}: raise "
            "--max-lora-rank"
        )
    expected = {names.a: (target.rank, module.in_features), names.b: (module.out_features, target.rank)}
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise invalid_adapter(
                f"{WEIGHTS_NAME}: {quoted(name)} has the shape {quoted(list(stored[name].shape))}; with the rank in "
                f"{CONFIG_NAME} and this model's layer it must be {list(shape)}{trained_on(base_model)}"
            )
    if stored[names.a].dtype != stored[names.b].dtype:
        raise invalid_adapter(
            f"{WEIGHTS_NAME}: {quoted(names.a)} is of another type than {quoted(names.b)}: {stored[names.a].dtype}, "
            f"{stored[names.b].dtype}"
        )


def _read_weights(descriptor: int, tensor: StoredTensor, name: str) -> torch.Tensor:
    values = read_tensor(descriptor, tensor, WEIGHTS_NAME)
    if not all(bool(chunk.isfinite().all()) for chunk in chunks(values)):
        raise invalid_adapter(f"{WEIGHTS_NAME}: {quoted(name)} has values that are infinite or no numbers")
    return values
