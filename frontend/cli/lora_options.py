"""LoRA adapters on the command line: what `--lora-modules` is given, and whether it can be."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer

from engine_core import BUILTIN_ADAPTERS, resolve_adapter
from engine_core.config import LoraModule

from .options import fail

LORA_MODULES_FLAG = "--lora-modules"

# What may follow the first adapter without the flag being repeated. A model, which may, too, is not like it.
_FURTHER_MODULE = re.compile(r"[^-/.=~{][^/=]*=.+|\{.*\}", re.DOTALL)


class _JsonModule(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's form. An adapter is always one of the model that is served, so `base_model_name` says nothing new."""

    name: str
    path: str
    base_model_name: str | None = None


def lora_module(text: str | LoraModule) -> LoraModule:
    """Parser of `--lora-modules`."""
    if isinstance(text, LoraModule):
        return text
    if text.lstrip().startswith("{"):
        try:
            given = msgspec.json.decode(text, type=_JsonModule)
        except msgspec.DecodeError as error:
            raise typer.BadParameter(f'{text!r} is not like {{"name": "a", "path": "dir"}}: {error}') from error
        name, path = given.name, given.path
    else:
        name, _, path = text.partition("=")
    if not name.strip() or not path:
        raise typer.BadParameter(f"{text!r} is not like NAME=PATH")
    directory = resolve_adapter(path)
    if not (directory / "adapter_config.json").is_file():
        reason = f"there is no adapter_config.json in {directory}"
        built_in = ", ".join(BUILTIN_ADAPTERS)
        raise typer.BadParameter(f"adapter '{name}': {reason}, and those that are built in are {built_in}")
    return LoraModule(name, str(directory))


def lora_root(directory: Path | None) -> str | None:
    """Callback of `--lora-root`."""
    return None if directory is None else str(directory.expanduser().absolute())


def with_lora(engine_settings: dict[str, Any], model_names: Sequence[str]) -> dict[str, Any]:
    """The settings with the adapters as `EngineConfig` has them.

    What does not fit together ends the command, before minutes of loading.
    """
    modules: tuple[LoraModule, ...] = tuple(engine_settings["lora_modules"] or ())
    if not engine_settings["enable_lora"]:
        for flag, value in ((LORA_MODULES_FLAG, modules), ("--lora-root", engine_settings["lora_root"])):
            if value:
                fail(f"{flag} needs --enable-lora")
    if (most := engine_settings["max_cpu_loras"]) < len(modules):
        fail(f"{LORA_MODULES_FLAG} names {len(modules)} adapters, but --max-cpu-loras is {most}")
    for module in modules:
        if module.name in model_names:
            fail(f"{LORA_MODULES_FLAG}: '{module.name}' is a name of the model itself")
    for name, times in Counter(module.name for module in modules).items():
        if times > 1:
            fail(f"{LORA_MODULES_FLAG} names {times} adapters '{name}'")
    return engine_settings | {"lora_modules": modules}


def flag_repeated(arguments: Sequence[str]) -> Iterator[str]:
    """`--lora-modules a=x b=y`, as vLLM has it, with the flag before each of them."""
    is_module, was_flag = False, False
    for argument in arguments:
        if is_module and _FURTHER_MODULE.fullmatch(argument):
            yield LORA_MODULES_FLAG
        else:
            is_module = was_flag or argument.startswith(f"{LORA_MODULES_FLAG}=")
        was_flag = argument == LORA_MODULES_FLAG
        yield argument
