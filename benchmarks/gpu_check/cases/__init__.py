"""One function for each file of kernels, which yields its cases; at last one for the engine that uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from benchmarks.gpu_check.case import Case, Setting
from benchmarks.gpu_check.cases import attention, cache, engine, lora, rows, sampling

CASES: Mapping[str, Callable[[Setting], Iterator[Case]]] = {
    "write_kv": cache.write_kv_cases,
    "rotary": cache.rotary_cases,
    "rotary_write_kv": cache.rotary_write_kv_cases,
    "copy_blocks": cache.copy_blocks_cases,
    "paged_attention": attention.paged_attention_cases,
    "penalties": sampling.penalties_cases,
    "restrict": sampling.restrict_cases,
    "sample_tokens": sampling.sample_tokens_cases,
    "rms_norm": rows.rms_norm_cases,
    "gated_activation": rows.gated_activation_cases,
    "lora": lora.lora_cases,
    "engine": engine.engine_cases,
}
