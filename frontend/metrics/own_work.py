"""The metric families of what the frontend does itself: what was asked of it, and what was saved."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from .families import PREFIX

# family → field of the stats, what it counts
Counters = Mapping[str, tuple[str, str]]

# Fields of `TokenizationStats`.
OF_TOKENIZATION: Counters = {
    "tokenizer_cache_queries": ("num_tokens", "Tokens of the texts that prompts were made of."),
    "tokenizer_cache_hits": ("num_remembered_tokens", "Tokens of those texts that were remembered."),
}
# Fields of `PictureStats`.
OF_PICTURES: Counters = {
    "mm_cache_queries": ("processor_cache_queries", "Pictures whose prepared form was wanted by an engine."),
    "mm_cache_hits": ("processor_cache_hits", "Pictures whose prepared form was there, or in the making."),
    "mm_processor_calls": ("processor_calls", "Pictures that the model's image processor prepared."),
    "mm_processor_bytes": ("input_bytes_made", "Bytes of the pictures that it prepared."),
    "mm_file_queries": ("memo_queries", "Picture files that came with requests."),
    "mm_file_hits": ("memo_hits", "Picture files that had come before and were not decoded again."),
    "mm_decodes": ("decodes", "Picture files that were decoded."),
}


class OwnWorkCollector(Collector):
    """Shows the fields of `stats` that `counters` names, as they are when they are collected."""

    def __init__(self, counters: Counters, stats: object, model_name: str) -> None:
        self._counters = counters
        self._stats = stats
        self._model_name = model_name
        self._created_s = time.time()

    def collect(self) -> Iterator[Metric]:
        for name, (field, what) in self._counters.items():
            family = CounterMetricFamily(PREFIX + name, what, labels=("model_name",))
            family.add_metric((self._model_name,), getattr(self._stats, field), created=self._created_s)
            yield family
