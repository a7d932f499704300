"""`adapter_config.json` → what a plain LoRA adapter is, or the setting that makes it something else.

PEFT's settings are of three kinds: those that say what is computed (`PeftConfig`), those that have no part in it, and
those that make it something else than `x·W + scaling·(x·A)·B`. One that is not known here may be of the third kind, so
it has to say nothing: null, false, or empty.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from msgspec import Struct

from .refusals import invalid_adapter, quoted

CONFIG_NAME = "adapter_config.json"

# No layer is as wide.
_MAX_RANK = 1 << 20
# Far beyond what anybody trains with, and far below where products of weights overflow.
_MAX_ALPHA = 1e6

_BOOKKEEPING = frozenset(
    (
        *("task_type", "revision", "inference_mode", "auto_mapping", "peft_version", "runtime_config"),
        *("lora_dropout", "megatron_core", "qalora_group_size"),
        # Of how weights began, which does not matter once they are trained; `init_lora_weights` says which was used.
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    )
)

_PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica")

_WHY_REFUSED = {
    "use_dora": "DoRA also scales each row of the weights, which is not computed here",
    "modules_to_save": "whole layers that replace the model's are not computed here, only LoRA beside them",
    "bias": "biases that replace the model's are not computed here",
    "lora_bias": "biases of LoRA layers are not computed here",
    "fan_in_fan_out": "this model has no transposed linear layers",
    "target_parameters": "LoRA on parameters that are no linear layer (experts, for instance) is not computed here",
    "trainable_token_indices": "embeddings of single tokens that replace the model's are not computed here",
    "layer_replication": "a model with repeated layers is another one than the one served",
    "alora_invocation_tokens": "aLoRA, which begins within a prompt, is not computed here",
    "use_qalora": "QA-LoRA, which pools inputs, is not computed here",
    "megatron_config": "Megatron's parallel layers are not computed here",
    "ensure_weight_tying": "LoRA on embeddings is not computed here",
    "arrow_config": "Arrow, which chooses among adapters, is not computed here",
    "velora_config": "VeLoRA is not computed here",
    "kasa_config": "KaSA changes the model's own weights",
    "use_bdlora": "BD-LoRA is not computed here",
    "monteclora_config": "MonteCLoRA, which draws weights at random, is not computed here",
}


class PeftConfig(Struct, kw_only=True, frozen=True):
    """What is computed, in PEFT's own words and with PEFT's defaults."""

    peft_type: str
    target_modules: str | list[str]
    r: int = 8
    lora_alpha: int | float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, int | float] | None = None
    exclude_modules: str | list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] | None = None
    base_model_name_or_path: str | None = None


def parse_peft_config(data: bytes) -> PeftConfig:
    """Raises AdapterError for anything but a plain LoRA adapter's settings, naming the one at fault."""
    try:
        settings = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid_adapter(f"{CONFIG_NAME} is no JSON that can be read: {error}") from None
    if not isinstance(settings, dict):
        raise invalid_adapter(f"{CONFIG_NAME} must be a JSON object")

    peft_type = settings.get("peft_type")
    if peft_type != "LORA":
        raise invalid_adapter(f"{CONFIG_NAME}: peft_type is {quoted(peft_type)}; only 'LORA' can be computed")
    if settings.get("target_modules") is None:
        raise invalid_adapter(f"{CONFIG_NAME}: target_modules must say which layers have LoRA")
    _refuse_other_settings(settings)
    try:
        config = msgspec.convert(settings, PeftConfig)
    except msgspec.ValidationError as error:
        raise invalid_adapter(f"{CONFIG_NAME}: {error}") from None
    _check_numbers(config)
    _check_layers(config)
    return config


def _refuse_other_settings(settings: dict[str, Any]) -> None:
    init = settings.get("init_lora_weights")
    if not (init is None or isinstance(init, bool) or (isinstance(init, str) and init.lower() in _PLAIN_STARTS)):
        raise invalid_adapter(
            f"{CONFIG_NAME}: init_lora_weights is {quoted(init)}, which may have changed the model's own weights, too. "
            "Save the adapter with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...): that makes it "
            "one for the unchanged model"
        )
    known = {*PeftConfig.__struct_fields__, *_BOOKKEEPING, "init_lora_weights"}
    for name, value in settings.items():
        if name in known or not value or (name == "bias" and value == "none"):
            continue
        why = _WHY_REFUSED.get(name, "this setting is not known here, so it may change what is computed")
        raise invalid_adapter(f"{CONFIG_NAME}: {quoted(name)} is {quoted(value)}: {why}")


def _check_numbers(config: PeftConfig) -> None:
    ranks = {"r": config.r} | {f"rank_pattern[{quoted(key)}]": r for key, r in (config.rank_pattern or {}).items()}
    for name, rank in ranks.items():
        if not 0 < rank <= _MAX_RANK:
            raise invalid_adapter(f"{CONFIG_NAME}: {name} is {quoted(rank)}; it must be from 1 to {_MAX_RANK:,}")
    alphas: dict[str, int | float] = {"lora_alpha": config.lora_alpha}
    alphas |= {f"alpha_pattern[{quoted(key)}]": alpha for key, alpha in (config.alpha_pattern or {}).items()}
    for name, alpha in alphas.items():
        if not (0 < alpha <= _MAX_ALPHA and math.isfinite(alpha)):
            raise invalid_adapter(
                f"{CONFIG_NAME}: {name} is {quoted(alpha)}; it must be above 0 and at most {_MAX_ALPHA:,.0f}"
            )


def _check_layers(config: PeftConfig) -> None:
    if isinstance(config.target_modules, str):
        for name in ("layers_to_transform", "layers_pattern"):
            if getattr(config, name) is not None:
                raise invalid_adapter(f"{CONFIG_NAME}: {name} has no meaning where target_modules is a string")
    elif config.layers_pattern and config.layers_to_transform is None:
        raise invalid_adapter(f"{CONFIG_NAME}: layers_pattern has no meaning without layers_to_transform")
