"""Which modules of a model an adapter's settings mean, and the rank and scaling of each: as PEFT finds them.

Names in lists are those of modules, or ends of them from a dot on. Strings are regular expressions of whole names;
`all-linear` is every linear layer but the output head. Keys of `rank_pattern` and `alpha_pattern` are regular
expressions of names or of such ends, the first that matches counts. `layers_to_transform` takes of what lists mean by
ends of names those with one of these numbers in them: the first number of all, or the first after a `layers_pattern`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from .expressions import FirstMatch, Question, first_matches
from .peft_config import CONFIG_NAME, PeftConfig
from .refusals import invalid_adapter, quoted, trained_on

# Whole names are meant whatever their layers are. But PEFT shortens lists of so many names, and what is then the end of
# a name is meant in these layers only.
_MANY_NAMES = 20


class Target(NamedTuple):
    """`scaling` is `alpha / rank`, with `use_rslora` `alpha / √rank`."""

    rank: int
    scaling: float


def find_targets(config: PeftConfig, modules: Collection[str], output_head: str | None) -> dict[str, Target]:
    """By path, all modules that have LoRA. `modules` are the model's linear layers; what an adapter says of others is
    not looked at. Takes some 30 ms where there are regular expressions.

    Raises AdapterError where the settings mean no module, are no regular expressions, or may mean one thing or another.
    """
    paths = list(modules)
    matches = first_matches(_questions(config), paths)
    nothing: list[FirstMatch | None] = [None] * len(paths)
    excluded = matches.get("exclude_modules", nothing)
    chosen = matches.get("target_modules", nothing)
    layers = matches.get("layers_pattern", nothing)
    ranks = matches.get("rank_pattern", nothing)
    alphas = matches.get("alpha_pattern", nothing)
    excluded_names, names, numbers = _names(config.exclude_modules), _names(config.target_modules), _layers(config)
    own_ranks, own_alphas = list((config.rank_pattern or {}).values()), list((config.alpha_pattern or {}).values())

    targets = {}
    for at, path in enumerate(paths):
        if excluded[at] or _is_listed(path, excluded_names):
            continue
        if _is_all_linear(config):
            is_target = path != output_head
        else:
            is_target = bool(chosen[at]) or (
                _is_listed(path, names) and _is_in_layers(path, names, numbers, layers[at])
            )
        if is_target:
            rank = config.r if (found := ranks[at]) is None else own_ranks[found.number]
            alpha = config.lora_alpha if (found := alphas[at]) is None else own_alphas[found.number]
            targets[path] = Target(rank, alpha / math.sqrt(rank) if config.use_rslora else alpha / rank)
    if not targets:
        raise invalid_adapter(
            f"{CONFIG_NAME}: target_modules matches no linear layer of this model"
            f"{trained_on(config.base_model_name_or_path)}"
        )
    return targets


def _questions(config: PeftConfig) -> dict[str, Question]:
    questions = {}
    if isinstance(config.target_modules, str) and not _is_all_linear(config):
        questions["target_modules"] = Question([config.target_modules], whole=True)
    if isinstance(config.exclude_modules, str) and config.exclude_modules:
        questions["exclude_modules"] = Question([config.exclude_modules], whole=True)
    if _layers(config):
        given = config.layers_pattern or []
        patterns = [given] if isinstance(given, str) else given
        after = [rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\." for pattern in patterns]
        questions["layers_pattern"] = Question(after or [r".*?\.[^.]*\.(?P<idx>\d+)\."], whole=False)
    if config.rank_pattern:
        questions["rank_pattern"] = Question([rf"(.*\.)?({key})$" for key in config.rank_pattern], whole=False)
    if config.alpha_pattern:
        questions["alpha_pattern"] = Question([rf"(.*\.)?({key})$" for key in config.alpha_pattern], whole=False)
    return questions


def _is_all_linear(config: PeftConfig) -> bool:
    return isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear"


def _names(given: str | list[str] | None) -> frozenset[str]:
    return frozenset(given) if isinstance(given, list) else frozenset()


def _layers(config: PeftConfig) -> frozenset[int]:
    given = config.layers_to_transform
    return frozenset([given] if isinstance(given, int) else given or [])


def _is_listed(path: str, names: frozenset[str]) -> bool:
    """It is one of these names, or ends with one from a dot on."""
    at = 0
    while path[at:] not in names:
        dot = path.find(".", at)
        if dot < 0:
            return False
        at = dot + 1
    return True


def _is_in_layers(path: str, names: frozenset[str], numbers: frozenset[int], layer: FirstMatch | None) -> bool:
    if not numbers or (layer is not None and layer.idx is not None and int(layer.idx) in numbers):
        return True
    if path in names and len(names) >= _MANY_NAMES:
        raise invalid_adapter(
            f"{CONFIG_NAME}: target_modules names {quoted(path)}, and layers_to_transform leaves its layer out"
        )
    return path in names
