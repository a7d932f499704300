"""The gate: what an engine refuses before it can trouble anybody.

`check_request` bounds everything that later code hashes, packs or turns into a tensor, so that nothing a request
contains can fail inside a step, where it would end its batch mates' requests too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

from ipc.vocabulary import (
    MAX_KEPT_PREFIXES,
    MAX_KEPT_PRIORITY,
    MAX_KEPT_TTL_S,
    EngineCapabilities,
    EngineRequest,
    ExtraKeySpan,
    SamplingParams,
)

from .config import EngineConfig
from .errors import InvalidConfigError, InvalidRequestError

MAX_KIND_BYTES = 255
MAX_KEY_BYTES = 4096
# Spans over one position: images, an adapter, a salt, prompt embeddings, and some of the embedder's own.
MAX_SPANS_PER_TOKEN = 16
MAX_INT32 = 2**31 - 1
MAX_LOGPROBS = 20
MAX_CONTINUATIONS = 128
# They go out in one message, with at most 15 bytes for each (`ipc.codec.WireLimits.max_body_bytes` allows a million).
# Who reads it does nothing else for about a tenth of a second.
MAX_PROMPT_LOGPROB_VALUES = 300_000
MAX_BAD_WORD_TOKENS = 65_536


def check_config(config: EngineConfig) -> None:
    """Refuse settings that contradict themselves.

    Raises:
        InvalidConfigError: naming the setting.
    """
    for name in (
        *("block_size", "max_num_seqs", "max_num_batched_tokens", "max_feature_input_bytes"),
        *("max_loras", "max_lora_rank", "max_cpu_loras"),
    ):
        if getattr(config, name) < 1:
            raise InvalidConfigError(f"{name}: must be at least 1, is {getattr(config, name)}")
    for name in (
        *("max_model_len", "num_blocks", "kv_cache_memory_bytes", "num_threads"),
        *("encoder_cache_bytes", "max_num_encoder_tokens"),
    ):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise InvalidConfigError(f"{name}: must be at least 1, is {value}")
    for name in ("max_num_queued_requests", "max_num_queued_tokens"):
        value = getattr(config, name)
        if value is not None and value < 0:
            raise InvalidConfigError(f"{name}: must be at least 0, is {value}")
    if config.cudagraph_capture_sizes and min(config.cudagraph_capture_sizes) < 1:
        raise InvalidConfigError(
            f"cudagraph_capture_sizes: must be at least 1, the smallest is {min(config.cudagraph_capture_sizes)}"
        )
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise InvalidConfigError(
            f"max_num_batched_tokens: {config.max_num_batched_tokens} gives some of max_num_seqs={config.max_num_seqs}"
            " running requests no token in a step; it must be at least max_num_seqs"
        )
    if config.long_prefill_token_threshold < 0:
        raise InvalidConfigError(f"long_prefill_token_threshold: {config.long_prefill_token_threshold} is negative")
    if config.long_prefill_token_threshold and not config.enable_chunked_prefill:
        raise InvalidConfigError("long_prefill_token_threshold: needs enable_chunked_prefill")
    if not (math.isfinite(config.feature_timeout_s) and config.feature_timeout_s > 0):
        raise InvalidConfigError(f"feature_timeout_s: must be finite and above 0, is {config.feature_timeout_s}")
    if not 0 <= config.watermark < 1:
        raise InvalidConfigError(f"watermark: a share of the pool in [0, 1), is {config.watermark}")
    for name in ("max_kept_share", "max_kept_share_per_tenant"):
        if not 0 <= getattr(config, name) <= 1:
            raise InvalidConfigError(f"{name}: a share of the pool in [0, 1], is {getattr(config, name)}")
    if not 0 < config.kv_cache_metrics_sample <= 1:
        raise InvalidConfigError(
            f"kv_cache_metrics_sample: a share of the blocks in (0, 1], is {config.kv_cache_metrics_sample}"
        )
    if config.records_kv_events and not config.enable_prefix_caching:
        raise InvalidConfigError("kv_events_config: without enable_prefix_caching there is nothing to tell")
    if not 0 < config.gpu_memory_utilization <= 1:
        raise InvalidConfigError(
            f"gpu_memory_utilization: a share of the memory in (0, 1], is {config.gpu_memory_utilization}"
        )
    _check_lora(config)


def _check_lora(config: EngineConfig) -> None:
    for name in ("lora_modules", "lora_root"):
        if getattr(config, name) and not config.enable_lora:
            raise InvalidConfigError(f"{name}: needs enable_lora")
    if config.lora_root is not None and not os.path.isdir(config.lora_root):
        raise InvalidConfigError(f"lora_root: {config.lora_root!r} is no directory")
    if len(config.lora_modules) > config.max_cpu_loras:
        raise InvalidConfigError(
            f"lora_modules: {len(config.lora_modules)} adapters, at most {config.max_cpu_loras} can be loaded"
            " (max_cpu_loras)"
        )
    names = [module.name for module in config.lora_modules]
    for name in names:
        if names.count(name) > 1:
            raise InvalidConfigError(f"lora_modules: {name!r} stands there {names.count(name)} times")


def check_request(request: EngineRequest, capabilities: EngineCapabilities) -> None:
    """Refuse what could never run, or would break a step for others.

    Raises:
        InvalidRequestError: naming the field and the true numbers.
    """
    if "\0" in request.request_id:
        raise InvalidRequestError("request_id: must not contain NUL, which marks its continuations", "request_id")
    _check_prompt(request.prompt_token_ids, capabilities)
    _check_spans(request.extra_key_spans, capabilities.max_model_len)
    _check_sampling(request.sampling_params, capabilities)
    _check_prompt_logprobs(request)
    _check_keep(request)
    if request.arrival_time_s is not None and not math.isfinite(request.arrival_time_s):
        raise InvalidRequestError(f"arrival_time_s: must be finite, is {request.arrival_time_s}", "arrival_time_s")


def _check_prompt(token_ids: list[int], capabilities: EngineCapabilities) -> None:
    if not token_ids:
        raise InvalidRequestError("prompt_token_ids: a prompt has at least one token", "prompt_token_ids")
    if len(token_ids) >= capabilities.max_model_len:
        reason = ""
        if capabilities.is_limited_by_pool:
            reason = f" (the KV pool of {capabilities.num_blocks} blocks holds no more)"
        raise InvalidRequestError(
            f"prompt_token_ids: the prompt has {len(token_ids)} tokens; prompt and output together may have"
            f" {capabilities.max_model_len}, at least one of them output{reason}",
            "prompt_token_ids",
        )
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0 or highest >= capabilities.vocab_size:
        raise InvalidRequestError(
            f"prompt_token_ids: token id {lowest if lowest < 0 else highest} is outside the vocabulary,"
            f" 0 … {capabilities.vocab_size - 1}",
            "prompt_token_ids",
        )


def _check_keep(request: EngineRequest) -> None:
    if len(request.keep) > MAX_KEPT_PREFIXES:
        raise InvalidRequestError(
            f"keep: {len(request.keep)} prefixes are to be kept, at most {MAX_KEPT_PREFIXES} may be", "keep"
        )
    if request.keep and not request.write_prefix_cache:
        raise InvalidRequestError("keep: nothing is kept of a request that writes nothing to the cache", "keep")
    for index, keep in enumerate(request.keep):
        name, num_prompt_tokens = f"keep[{index}]", len(request.prompt_token_ids)
        if not 0 < keep.num_tokens <= num_prompt_tokens:
            raise InvalidRequestError(
                f"{name}.num_tokens: is {keep.num_tokens}, the prompt has {num_prompt_tokens}", "keep"
            )
        if not 0 < keep.ttl_s <= MAX_KEPT_TTL_S:
            raise InvalidRequestError(f"{name}.ttl_s: must be in (0, {MAX_KEPT_TTL_S}], is {keep.ttl_s}", "keep")
        if not 0 <= keep.priority <= MAX_KEPT_PRIORITY:
            raise InvalidRequestError(
                f"{name}.priority: must be in [0, {MAX_KEPT_PRIORITY}], is {keep.priority}", "keep"
            )
    num_bytes = _num_bytes(request.tenant)
    if num_bytes is None or num_bytes > MAX_KEY_BYTES:
        raise InvalidRequestError(f"tenant: must be Unicode of at most {MAX_KEY_BYTES} bytes", "tenant")


def _check_spans(spans: tuple[ExtraKeySpan, ...], max_model_len: int) -> None:
    num_covered = 0
    for index, span in enumerate(spans):
        name = f"extra_key_spans[{index}]"
        if span.start < 0 or (span.end is not None and span.end <= span.start):
            raise InvalidRequestError(
                f"{name}: [{span.start}, {span.end}) is no range of token positions", "extra_key_spans"
            )
        for part, value, limit_bytes in (
            ("kind", span.kind, MAX_KIND_BYTES),
            ("key", span.key, MAX_KEY_BYTES),
            ("label", span.label, MAX_KEY_BYTES),
        ):
            num_bytes = _num_bytes(value)
            if num_bytes is None:
                raise InvalidRequestError(f"{name}.{part}: is not valid Unicode", "extra_key_spans")
            if num_bytes > limit_bytes:
                raise InvalidRequestError(
                    f"{name}.{part}: has {num_bytes} bytes, at most {limit_bytes} are allowed", "extra_key_spans"
                )
        num_covered += max(1, min(max_model_len, span.end or max_model_len) - span.start)
    if num_covered > MAX_SPANS_PER_TOKEN * max_model_len:
        raise InvalidRequestError(
            f"extra_key_spans: {len(spans)} spans cover {num_covered} positions, at most"
            f" {MAX_SPANS_PER_TOKEN} × {max_model_len} are allowed",
            "extra_key_spans",
        )


def _num_bytes(value: str | bytes) -> int | None:
    """None for text that has no UTF-8 form (lone surrogates)."""
    try:
        return len(value.encode() if isinstance(value, str) else value)
    except UnicodeEncodeError:
        return None


def _check_sampling(params: SamplingParams, capabilities: EngineCapabilities) -> None:
    if params.max_tokens is not None and not 1 <= params.max_tokens <= capabilities.max_model_len:
        raise InvalidRequestError(
            f"max_tokens: must be in 1 … {capabilities.max_model_len}, is {params.max_tokens}", "max_tokens"
        )
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise InvalidRequestError(f"temperature: must be finite and at least 0, is {params.temperature}", "temperature")
    if not 0 < params.top_p <= 1:
        raise InvalidRequestError(f"top_p: must be in (0, 1], is {params.top_p}", "top_p")
    if not 0 <= params.top_k <= MAX_INT32:
        raise InvalidRequestError(f"top_k: must be in 0 (off) … {MAX_INT32}, is {params.top_k}", "top_k")
    _check_logit_settings(params, capabilities.vocab_size)
    if params.min_tokens < 0 or (params.max_tokens is not None and params.min_tokens > params.max_tokens):
        raise InvalidRequestError(
            f"min_tokens: must be in 0 … max_tokens ({params.max_tokens}), is {params.min_tokens}", "min_tokens"
        )
    if not 1 <= params.n <= MAX_CONTINUATIONS:
        raise InvalidRequestError(f"n: must be in 1 … {MAX_CONTINUATIONS}, is {params.n}", "n")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            raise InvalidRequestError(f"{name}: must be in 0 … {MAX_LOGPROBS}, is {value}", name)
    if params.seed is not None and not -(2**63) <= params.seed < 2**63:
        raise InvalidRequestError(f"seed: must be a signed 64-bit integer, is {params.seed}", "seed")


def _check_prompt_logprobs(request: EngineRequest) -> None:
    num_top_tokens, num_tokens = request.sampling_params.prompt_logprobs, len(request.prompt_token_ids)
    # Besides the likeliest tokens: the prompt's own, and its rank.
    if num_top_tokens is not None and (num_values := num_tokens * (num_top_tokens + 2)) > MAX_PROMPT_LOGPROB_VALUES:
        raise InvalidRequestError(
            f"prompt_logprobs: {num_top_tokens} for each of {num_tokens} prompt tokens make {num_values} values with"
            f" those of the prompt itself, at most {MAX_PROMPT_LOGPROB_VALUES} are allowed",
            "prompt_logprobs",
        )


def _check_logit_settings(params: SamplingParams, vocab_size: int) -> None:
    if not 0 <= params.min_p <= 1:
        raise InvalidRequestError(f"min_p: must be in [0, 1], is {params.min_p}", "min_p")
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= getattr(params, name) <= 2:
            raise InvalidRequestError(f"{name}: must be in [-2, 2], is {getattr(params, name)}", name)
    if not (math.isfinite(params.repetition_penalty) and params.repetition_penalty > 0):
        raise InvalidRequestError(
            f"repetition_penalty: must be finite and above 0, is {params.repetition_penalty}", "repetition_penalty"
        )
    for token_id, bias in params.logit_bias.items():
        if not math.isfinite(bias):
            raise InvalidRequestError(f"logit_bias[{token_id}]: must be finite, is {bias}", "logit_bias")
    _check_vocabulary("logit_bias", params.logit_bias, vocab_size)
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids: at least one token must be allowed", "allowed_token_ids")
        _check_vocabulary("allowed_token_ids", params.allowed_token_ids, vocab_size)
    num_bad_word_tokens = sum(len(word) for word in params.bad_words_token_ids)
    if not all(params.bad_words_token_ids) or num_bad_word_tokens > MAX_BAD_WORD_TOKENS:
        raise InvalidRequestError(
            f"bad_words_token_ids: no word may be empty, and all together have at most {MAX_BAD_WORD_TOKENS} tokens"
            f" (they have {num_bad_word_tokens})",
            "bad_words_token_ids",
        )
    for word in params.bad_words_token_ids:
        _check_vocabulary("bad_words_token_ids", word, vocab_size)


def _check_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    outside = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
    if outside is not None:
        raise InvalidRequestError(f"{name}: token id {outside} is outside the vocabulary, 0 … {vocab_size - 1}", name)
