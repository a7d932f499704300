"""The engine core: requests in, tokens out, no sockets. This is the embedding API."""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from ipc.kv_events import KVEvent
from ipc.messages import EngineOutputs
from ipc.stats import EngineStats, PrefixCacheReset
from ipc.vocabulary import AdapterInfo, CacheProbe, EngineRequest, RequestError, WantedFeature

from .admission import AdmissionGate
from .ahead import schedule_ahead
from .capabilities import engine_capabilities
from .checks import check_config, check_request
from .config import EngineConfig
from .encoder_cache import encoder_cache_bytes
from .errors import InvalidRequestError
from .feature_checks import FeatureLimits, check_features, check_inputs
from .features import FeatureManager
from .kv_cache import BlockHasher, BlockResidency, KVCacheManager
from .kv_cache.explain import explain_cache, probe_cache
from .kv_events.describe import EventDescriber
from .kv_events.recorder import KVEventRecorder
from .lora.engine_adapters import EngineAdapters
from .request import Request, RequestStatus
from .runner import LaunchedStep, Runner, StepResult
from .scheduler import Scheduler
from .step import Step

logger = logging.getLogger(__name__)


class EngineCore:
    """Runs many requests on one model, sharing the KV cache of their common prefixes.

    Call `add_request` whenever you like and `step` while `has_unfinished_requests`. One thread at a time, except
    `prepare_request`, `stats`, `load_adapter`, `unload_adapter` and `adapters`, which any thread may call at any time.
    Pictures' inputs come with `add_request`, or when they are needed: after each call that may need some, `take_wanted`
    tells of which `supply_feature` must follow; until `has_work_now` again, `step` does nothing.

    Args:
        config: see `EngineConfig`.
        runner: what computes the steps; default: `config.model`, loaded here.

    Attributes:
        capabilities: what a caller may ask of this engine.
        num_consecutive_failed_steps: 0 after a step that ran; a device that fails again and again does not recover.
        kv_recorder: what the prefix cache gains and loses; None unless `kv_events_config` enables it.
        kv_describer: what its changes are to others.

    Raises:
        InvalidConfigError: a setting is impossible; the message names it and the true numbers.
    """

    def __init__(self, config: EngineConfig, runner: Runner | None = None) -> None:
        check_config(config)
        if runner is None:
            from .model.runner import ModelRunner

            runner = ModelRunner(config)
        self.config = config
        self.runner = runner
        info = runner.info
        self.capabilities = engine_capabilities(config, info)
        self._adapters = EngineAdapters(config, runner)
        self._hasher = BlockHasher(
            config.prefix_caching_hash_algo,
            config.block_size,
            seed=config.prefix_caching_hash_seed,
            namespace=info.cache_namespace,
        )
        self._residency = BlockResidency(config.kv_cache_metrics_sample) if config.kv_cache_metrics else None
        self.kv_recorder = KVEventRecorder(len(info.windows), info.num_blocks) if config.records_kv_events else None
        self.kv_describer = EventDescriber(config.block_size, info.windows, config.kv_events_hashes)
        self._features = make_feature_manager(config, runner)
        self._feature_limits = FeatureLimits.of(
            config, info, self._features.cache.capacity_bytes if self._features else 0
        )
        self._scheduler = Scheduler(
            KVCacheManager(
                info.num_blocks,
                config.block_size,
                enable_caching=config.enable_prefix_caching,
                full_prompt_hit=config.full_prompt_hit,
                windows=info.windows,
                max_step_tokens=config.max_num_batched_tokens,
                match_unit=config.prefix_match_unit,
                window_retention=config.window_retention,
                eviction_policy=config.eviction_policy,
                residency=self._residency,
                max_kept_share=config.max_kept_share,
                max_kept_share_per_tenant=config.max_kept_share_per_tenant,
                tree=self.kv_recorder,
            ),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.capabilities.max_model_len,
            eos_token_ids=info.eos_token_ids,
            hash_blocks=self._hash_blocks,
            policy=config.scheduling_policy,
            enable_chunked_prefill=config.enable_chunked_prefill,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            reserve_full_sequence=config.reserve_full_sequence,
            num_watermark_blocks=int(config.watermark * info.num_blocks),
            share_in_flight=config.share_in_flight,
            features=self._features,
            adapter_slots=self._adapters.slots,
        )
        self._gate = AdmissionGate(
            self._scheduler,
            max_num_queued_requests=config.max_num_queued_requests,
            max_num_queued_tokens=config.max_num_queued_tokens,
        )
        self._schedules_ahead = info.runs_apart if config.async_scheduling is None else config.async_scheduling
        self._ahead: _Launch | None = None
        self._num_failed_steps = 0
        self.num_consecutive_failed_steps = 0

    def add_request(
        self, request: EngineRequest, inputs: Mapping[bytes, Mapping[str, np.ndarray]] | None = None
    ) -> None:
        """Queue a request. `inputs` are those of its `mm_features`, by key, as far as they are at hand: the others are
        asked for when they are needed (`take_wanted`).

        Raises:
            InvalidRequestError: it can never run here; `.param` names the field.
            EngineOverloadedError: too many wait (`max_num_queued_requests`, `max_num_queued_tokens`); try again later.
        """
        prepared = self.prepare_request(request)
        if inputs:
            check_inputs(inputs, request.mm_features)
            prepared.inputs = inputs
        self.add_prepared(prepared)

    def prepare_request(self, request: EngineRequest) -> Request:
        """Check a request and hash its blocks: the part of adding it that needs no engine state.

        Raises:
            InvalidRequestError: it can never run here.
        """
        check_request(request, self.capabilities)
        adapter = self._adapters.of_request(request)
        units = check_features(request, self._feature_limits)
        if request.mm_features:
            try:
                self.runner.check_features(request.mm_features)
            except ValueError as error:
                raise InvalidRequestError(str(error), "mm_features") from error
        params = request.sampling_params
        num_prompt_tokens = len(request.prompt_token_ids)
        room = self.capabilities.max_model_len - num_prompt_tokens
        prepared = Request(
            request,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            arrival_time_s=time.time() if request.arrival_time_s is None else request.arrival_time_s,
            feature_units=units,
            adapter=adapter,
        )
        self._hash_blocks(prepared)
        return prepared

    def load_adapter(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        root: str | os.PathLike[str] | None = None,
        replaces: bool = False,
        digest: str | None = None,
    ) -> AdapterInfo:
        """Read the LoRA adapter in the PEFT directory `path`, and let requests ask for it as `name`.

        Steps go on meanwhile. The same weights under the same name are fine; a name that has others is refused unless
        this `replaces` them: requests that were added before keep those. With a `root` a relative path begins there,
        and all that is read must lie below it; with a `digest` (hex) no other weights are accepted.

        Raises:
            AdapterError: nothing has changed; `.reason` and `.param` are those of `ipc.messages.AdapterAnswer`.
        """
        return self._adapters.load(name, path, None if root is None else Path(root), replaces=replaces, digest=digest)

    def unload_adapter(self, name: str) -> AdapterInfo:
        """No further request may ask for `name`; those that were prepared with it keep its adapter to their end.

        Raises:
            AdapterError: no adapter is called so.
        """
        return self._adapters.unload(name)

    def adapters(self) -> list[AdapterInfo]:
        """The adapters that are loaded, in the order in which their names came."""
        return self._adapters.infos()

    def add_prepared(self, request: Request) -> None:
        """Queue what `prepare_request` returned.

        Raises:
            InvalidRequestError: an unfinished request has the same id.
            EngineOverloadedError: as `add_request`.
        """
        if self._scheduler.requests.continuations(request.request_id):
            raise InvalidRequestError(
                f"request_id: {request.request_id!r} belongs to an unfinished request", "request_id"
            )
        self._gate.check(request)
        if self.kv_recorder is not None:
            self.kv_describer.learn_labels(request.extra_key_spans)
        self._scheduler.add(request)

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """End these requests now; no output will mention them again. Unknown ids are ignored. Returns those ended."""
        return self._scheduler.abort(request_ids)

    def abort_continuations(self, continuations: Iterable[tuple[str, int]]) -> None:
        """End single continuations, `(request_id, index)` each, from their request's first output on; others run on.

        No output will mention them again; an output that would have ended their request may have been theirs. Unknown
        ones are ignored.
        """
        self._scheduler.abort_continuations(continuations)

    def step(self) -> EngineOutputs:
        """Compute one step. Empty if nothing is unfinished, or everything that is waits for inputs.

        If the model fails, the requests of this step end with `finish_reason` "error", their blocks
        are freed, nothing computed in this step stays in the cache, and the engine goes on.

        With `async_scheduling` the step after this one may be running when this returns (`ahead`): what happens to its
        requests until the next call is as if it had not begun.
        """
        launched, self._ahead = self._ahead or self._launch(self._scheduler.schedule()), None
        step = launched.step
        if not step.scheduled:
            return EngineOutputs(step.failed)
        ahead = schedule_ahead(self._scheduler, step) if self._schedules_ahead and launched.is_running else None
        behind = None if ahead is None else self._launch(ahead)
        try:
            result = launched.wait()
        except Exception as error:
            self._num_failed_steps += 1
            self.num_consecutive_failed_steps += 1
            logger.exception("step_failed requests=%d tokens=%d", len(step.scheduled), step.num_tokens)
            reason = RequestError("internal", f"the model failed in this step: {type(error).__name__}: {error}")
            outputs = self._scheduler.withdraw(step)
            for output in outputs:
                output.error = reason
            return EngineOutputs(step.failed + outputs)
        self.num_consecutive_failed_steps = 0
        self._ahead = behind
        return EngineOutputs(step.failed + self._scheduler.update(step, result, ahead))

    def _launch(self, step: Step) -> _Launch:
        self._gate.observe_step()
        launch = _Launch(step)
        if step.scheduled:
            try:
                if step.copies:
                    self.runner.copy_slots(step.copies)
                launch.running = self.runner.launch(step.scheduled)
            except Exception as error:
                launch.error = error
        return launch

    def has_unfinished_requests(self) -> bool:
        return bool(self._scheduler.requests)

    def has_work_now(self) -> bool:
        """Whether `step` would do something now. False while all unfinished requests wait for inputs; that one of them
        has waited too long is work.
        """
        return self._ahead is not None or self._scheduler.has_work_now()

    def take_wanted(self) -> list[WantedFeature]:
        """The features whose inputs are needed, each once: to be answered by `supply_feature`, unless its request ends.

        There may be more after `add_request`, `add_prepared`, `step`, `abort_requests` and `abort_continuations`.
        """
        return [] if self._features is None else self._features.take_wanted()

    def supply_feature(
        self,
        request_id: str,
        key: bytes,
        inputs: Mapping[str, np.ndarray],
        error: RequestError | None = None,
    ) -> None:
        """Here are inputs that were wanted; with `error`, why there are none, which ends the request in the next step.

        What is not awaited (any more) is dropped.
        """
        self._scheduler.supply_feature(request_id, key, inputs, error)

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> PrefixCacheReset:
        """Forget every cached prefix, kept or not, and what was made of pictures. Requests that run go on with what
        they have; nobody finds it any more, nor what they compute behind it.

        With `reset_running_requests` they are preempted first, and computed again later.
        """
        if reset_running_requests:
            self._scheduler.preempt_all()
        kv = self._scheduler.kv
        num_cached_blocks = kv.pool.num_cached_blocks
        kv.reset_prefix_cache()
        num_features = num_features_in_use = 0
        if self._features is not None:
            num_features = len(self._features.cache)
            self._features.cache.clear()
            num_features_in_use = len(self._features.cache)
        return PrefixCacheReset(
            num_dropped_blocks=num_cached_blocks,
            num_blocks_in_use=kv.pool.num_blocks - kv.pool.num_free_blocks,
            num_requests_in_use=len(kv.tables),
            num_dropped_features=num_features - num_features_in_use,
            num_features_in_use=num_features_in_use,
        )

    def take_kv_events(self) -> list[KVEvent]:
        """What the prefix cache has gained and lost since the last call, in order: after each step, and each reset.

        Whoever takes them seldom loses none: after very many changes they begin with `AllBlocksCleared`, and then tell
        of all that is there. Empty unless `kv_events_config` enables them.
        """
        return [] if self.kv_recorder is None else self.kv_describer.events(self.kv_recorder.take())

    def probe(self, request: EngineRequest) -> CacheProbe:
        """What `request` would find in the prefix cache, if it were added and admitted now. Changes nothing.

        Raises:
            InvalidRequestError: it can never run here.
        """
        return self.probe_prepared(self.prepare_request(request), None)

    def explain(self, request: EngineRequest, *, relative_end: int = 0) -> CacheProbe:
        """The same with its `explanation`: where its longest cached relative goes on differently, and how, up to token
        `relative_end` of the sequence, or for some tokens if those are fewer.

        Raises:
            InvalidRequestError: it can never run here.
        """
        return self.probe_prepared(self.prepare_request(request), relative_end)

    def probe_prepared(self, request: Request, relative_end: int | None) -> CacheProbe:
        """`probe`, or `explain` if there is a `relative_end`, of what `prepare_request` returned."""
        kv = self._scheduler.kv
        kv.release_expired()
        return probe_cache(kv, request) if relative_end is None else explain_cache(kv, request, relative_end)

    def stats(self) -> EngineStats:
        """Any thread may ask at any time. During a step every number is true, but not all are of the same instant."""
        scheduler, pool, slots = self._scheduler, self._scheduler.kv.pool, self._scheduler.slots
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_waiting_aside=scheduler.waiting.num_aside,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free_blocks,
            num_cached_hashes=pool.tree.num_held,
            kv_cache_usage=pool.usage,
            failed_steps=self._num_failed_steps,
            # An engine that rests releases nothing.
            num_kept_blocks=pool.kept.num_blocks - pool.kept.num_overdue_blocks(),
            kept_blocks_refused=pool.kept.num_refused_blocks,
            kept_blocks_given_up=pool.kept.num_given_up_blocks,
            block_residency={} if self._residency is None else self._residency.durations(),
            num_adapters=len(self.adapters()),
            adapter_bytes=self._adapters.num_bytes,
            adapter_slots=slots.num_slots,
            adapter_slots_in_use=slots.num_held,
            adapter_placements=slots.num_placements,
            adapter_slot_waits=scheduler.turns.num_waits,
            running_adapters=scheduler.adapter_names(RequestStatus.RUNNING),
            waiting_adapters=scheduler.adapter_names(RequestStatus.WAITING, RequestStatus.PREEMPTED),
            **dataclasses.asdict(scheduler.counters),
            **({} if self._features is None else self._features.stats()),
        )

    def _hash_blocks(self, request: Request) -> None:
        if self.config.enable_prefix_caching:
            self._hasher.extend(request)


@dataclasses.dataclass(slots=True)
class _Launch:
    """A step, and what is known of how it runs: nothing if it is empty. A launch that failed says so when it is waited
    for, so that what the step before it has computed is handed out first.
    """

    step: Step
    running: LaunchedStep | None = None
    error: Exception | None = None

    @property
    def is_running(self) -> bool:
        return self.running is not None

    def wait(self) -> StepResult:
        if self.error is not None:
            raise self.error
        assert self.running is not None
        return self.running.wait()


def make_feature_manager(config: EngineConfig, runner: Runner) -> FeatureManager | None:
    """None where the model takes no pictures."""
    multimodal = runner.info.multimodal
    if multimodal is None:
        return None
    return FeatureManager(
        runner.encode,
        embed_bytes=multimodal.embed_bytes,
        cache_bytes=encoder_cache_bytes(config, multimodal.embed_bytes),
        max_rows_per_step=config.max_num_encoder_tokens or config.max_num_batched_tokens,
        max_input_bytes=config.max_feature_input_bytes,
        timeout_s=config.feature_timeout_s,
    )
