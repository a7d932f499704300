"""The metric families of requests: what their frontend saw of them.

Names, labels and meanings are vLLM's, with our prefix. A request is one prompt with all its continuations, and counts
from its first output on: then its prompt and its cached tokens count, once, and each generated token when it is handed
on. So the counters' increase is the sum of all answers' `usage`, plus what those got that broke off.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram

from .tenants import Tenants

PREFIX = "foreword:"

_LABELS = ("model_name", "engine")
FINISHED_REASONS = ("stop", "length", "abort", "error")
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")

_TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640),
    2560,
)
_BETWEEN_TOKENS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20),
    *(40, 80),
)
_REQUEST_S = (
    *(0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920),
    7680,
)
_CONTINUATIONS = (1, 2, 5, 10, 20)
_PREEMPTIONS = (0, 1, 2, 5, 10, 20)


class EngineFamilies:
    """The families' children for the requests of one engine."""

    def __init__(self, families: RequestFamilies, engine_index: int) -> None:
        labels = (families.model_name, str(engine_index))
        self.prompt_tokens = families.prompt_tokens.labels(*labels)
        self.prompt_tokens_computed = families.prompt_tokens_by_source.labels(*labels, "local_compute")
        self.prompt_tokens_hit = families.prompt_tokens_by_source.labels(*labels, "local_cache_hit")
        self.prompt_tokens_cached = families.prompt_tokens_cached.labels(*labels)
        self.prompt_tokens_cached_on_device = families.prompt_tokens_cached_by_source.labels(*labels, "device")
        self.prompt_image_tokens = families.prompt_image_tokens.labels(*labels)
        self.generation_tokens = families.generation_tokens.labels(*labels)
        self.finished = {reason: families.request_success.labels(*labels, reason) for reason in FINISHED_REASONS}
        self.time_to_first_token_s = families.time_to_first_token_s.labels(*labels)
        self.inter_token_latency_s = families.inter_token_latency_s.labels(*labels)
        self.time_per_output_token_s = families.time_per_output_token_s.labels(*labels)
        self.e2e_s = families.e2e_s.labels(*labels)
        self.queue_s = families.queue_s.labels(*labels)
        self.inference_s = families.inference_s.labels(*labels)
        self.prefill_s = families.prefill_s.labels(*labels)
        self.decode_s = families.decode_s.labels(*labels)
        self.request_prompt_tokens = families.request_prompt_tokens.labels(*labels)
        self.request_generation_tokens = families.request_generation_tokens.labels(*labels)
        self.request_max_num_generation_tokens = families.request_max_num_generation_tokens.labels(*labels)
        self.request_params_n = families.request_params_n.labels(*labels)
        self.request_params_max_tokens = families.request_params_max_tokens.labels(*labels)
        self.request_num_preemptions = families.request_num_preemptions.labels(*labels)
        self.request_prefill_kv_computed_tokens = families.request_prefill_kv_computed_tokens.labels(*labels)


class RequestFamilies:
    """The families, registered. All children exist from the start, so that no rate misses the first event.

    Attributes:
        admission_rejections: labels `model_name` and `reason`; count with `reject`.
        tenants: counts whose prompts were found in the cache.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, engine_indexes: Iterable[int]) -> None:
        self.model_name = model_name

        def counter(name: str, what: str, *more_labels: str) -> Counter:
            return Counter(PREFIX + name, what, (*_LABELS, *more_labels), registry=registry)

        def histogram(name: str, what: str, bounds: Iterable[float]) -> Histogram:
            return Histogram(PREFIX + name, what, _LABELS, buckets=tuple(bounds), registry=registry)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens, computed or cached.")
        self.prompt_tokens_by_source = counter(
            "prompt_tokens_by_source", "Prompt tokens by where their KV came from.", "source"
        )
        self.prompt_tokens_cached = counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self.prompt_tokens_cached_by_source = counter(
            "prompt_tokens_cached_by_source",
            "Prompt tokens found in the prefix cache, by where it is.",
            "source",
        )
        self.prompt_image_tokens = counter(
            "prompt_image_tokens", "Prompt tokens that stand for pictures, computed or cached."
        )
        self.tenants = Tenants(
            model_name,
            *(
                Counter(PREFIX + name, what, ("model_name", "tenant"), registry=registry)
                for name, what in (
                    ("tenant_prompt_tokens", "Prompt tokens by tenant, computed or cached."),
                    ("tenant_prompt_tokens_cached", "Prompt tokens found in the prefix cache, by tenant."),
                )
            ),
        )
        self.generation_tokens = counter("generation_tokens", "Generated tokens handed on.")
        self.request_success = counter("request_success", "Requests that ended.", "finished_reason")
        self.admission_rejections = Counter(
            PREFIX + "admission_rejections",
            "Requests refused because too much was waiting.",
            ("model_name", "reason"),
            registry=registry,
        )
        for reason in REJECTION_REASONS:
            self.admission_rejections.labels(model_name, reason)
        self.time_to_first_token_s = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST_TOKEN_S
        )
        self.inter_token_latency_s = histogram(
            "inter_token_latency_seconds", "Between the arrivals of tokens that follow each other.", _BETWEEN_TOKENS_S
        )
        self.time_per_output_token_s = histogram(
            "request_time_per_output_token_seconds",
            "A request's mean time per token after the first.",
            _BETWEEN_TOKENS_S,
        )
        self.e2e_s = histogram("e2e_request_latency_seconds", "From a request's arrival to its end.", _REQUEST_S)
        self.queue_s = histogram(
            "request_queue_time_seconds", "In the engine, until the request is admitted.", _REQUEST_S
        )
        self.inference_s = histogram(
            "request_inference_time_seconds", "In the engine, from admission to the last token.", _REQUEST_S
        )
        self.prefill_s = histogram(
            "request_prefill_time_seconds", "In the engine, from admission to the first token.", _REQUEST_S
        )
        self.decode_s = histogram(
            "request_decode_time_seconds", "In the engine, from the first token to the last.", _REQUEST_S
        )
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Generated tokens of a request, all continuations together.", _TOKENS
        )
        self.request_max_num_generation_tokens = histogram(
            "request_max_num_generation_tokens", "Generated tokens of a request's longest continuation.", _TOKENS
        )
        self.request_params_n = histogram("request_params_n", "Continuations asked for.", _CONTINUATIONS)
        self.request_params_max_tokens = histogram(
            "request_params_max_tokens", "`max_tokens` of requests that have one.", _TOKENS
        )
        self.request_num_preemptions = histogram(
            "request_num_preemptions", "How often a request was preempted.", _PREEMPTIONS
        )
        self.request_prefill_kv_computed_tokens = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not cached.", _TOKENS
        )
        self._engines = {index: EngineFamilies(self, index) for index in engine_indexes}

    def of_engine(self, engine_index: int) -> EngineFamilies:
        return self._engines[engine_index]

    def reject(self, reason: str) -> None:
        """Count a request refused on arrival; `reason` is one of `REJECTION_REASONS`."""
        self.admission_rejections.labels(self.model_name, reason).inc()
