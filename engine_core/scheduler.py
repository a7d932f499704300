"""Who computes how many tokens in the next step.

There is no prefill phase and no decode phase: each request catches up from `num_computed_tokens` to `num_tokens`, and a
step gives every request as many new tokens as its budget allows (vLLM's idea). Running requests come first, in
order of admission; then waiting ones are admitted while budget, seats and blocks last. When a running request
finds no block, another one is preempted: its blocks are freed, and it is computed again later, mostly from the cache.

Where a prompt has pictures, `FeatureManager` says how far a chunk can reach, and has them encoded. Where requests ask
for LoRA adapters, `SlotTurns` says whose adapter gets a slot.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from ipc.vocabulary import RequestError, RequestOutput

from .config import SchedulingPolicy
from .features import FeatureError, FeatureManager
from .kv_cache import KVCacheManager, PrefixHit
from .lora.slot_turns import SlotTurns
from .lora.slots import AdapterSlots, no_slots
from .request import Request, RequestStatus, continuation_id
from .runner import EncodedFeature, ScheduledRequest, StepResult
from .sharing import MAX_WAITS_PER_STEP, SharingInFlight
from .stats import SchedulerCounters
from .step import RequestFailedError, Step
from .token_outputs import finish_reason, token_output
from .unfinished import UnfinishedRequests
from .waiting_queue import make_waiting_queue

logger = logging.getLogger(__name__)


class Scheduler:
    """Continuous batching over a `KVCacheManager`.

    Every request added fits the pool alone (`EngineCore` refuses others), so whenever requests are unfinished,
    `schedule` returns a step that computes at least one token, unless all wait for pictures' inputs, or one ends or is
    preempted for want of them. The cost of a step grows with what is scheduled, not with how many wait or how much is
    cached; the first in the queue is looked up again only when blocks were freed for it or more of it was cached (with
    `reserve_full_sequence`; else in every step).

    Args:
        kv: block tables and prefix cache.
        max_num_seqs: most requests in one step.
        max_num_batched_tokens: most tokens in one step.
        max_model_len: a request that reaches this many tokens is finished.
        eos_token_ids: end a request unless it ignores them.
        hash_blocks: extends a request's `block_hashes`; called when a generated token completes a block.
        features: for requests with pictures; without it there must be none.
        adapter_slots: for requests with adapters; without it there must be none.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        hash_blocks: Callable[[Request], None] = lambda request: None,
        policy: SchedulingPolicy = "fcfs",
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        reserve_full_sequence: bool = True,
        num_watermark_blocks: int = 0,
        share_in_flight: bool = True,
        features: FeatureManager | None = None,
        adapter_slots: AdapterSlots | None = None,
    ) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.hash_blocks = hash_blocks
        self.policy: SchedulingPolicy = policy
        self.enable_chunked_prefill = enable_chunked_prefill
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.reserve_full_sequence = reserve_full_sequence
        self.num_watermark_blocks = num_watermark_blocks
        self.share_in_flight = share_in_flight and kv.enable_caching
        self._optional_features = features
        self.requests = UnfinishedRequests()
        self.running: list[Request] = []
        self.waiting = make_waiting_queue(policy, self._num_cached_blocks)
        self._sharing = SharingInFlight(kv)
        self.slots = adapter_slots or no_slots()
        self.turns = SlotTurns(self.slots, self.waiting.place, max_num_seqs)
        self.counters = SchedulerCounters()
        # Not ended at once: in the middle of a step others may share blocks that it registered.
        self._failing: list[RequestFailedError] = []

    @property
    def features(self) -> FeatureManager:
        assert self._optional_features is not None
        return self._optional_features

    def has_work_now(self) -> bool:
        """Whether a step now would do something. If requests are unfinished without, they all wait for inputs."""
        if self.running or self._failing or self._sharing or self.waiting.peek() is not None:
            return True
        if self.turns.is_anyone_waiting or self.slots.has_unloaded():
            return True
        return self._optional_features is not None and self._optional_features.has_work_now()

    def adapter_names(self, *statuses: RequestStatus) -> list[str]:
        """By which requests of these statuses have asked for adapters, each once, sorted. Any thread may ask."""
        if not self.slots.num_slots:
            return []
        requests = self.requests.as_they_are_now()
        return sorted({request.adapter_name for request in requests if request.status in statuses} - {""})

    def add(self, request: Request) -> None:
        self.requests.add(request)
        self.waiting.add(request)
        if request.features:
            self.features.prefetch(request, self._find_hit(request).num_tokens)

    def supply_feature(
        self, output_id: str, key: bytes, inputs: Mapping[str, np.ndarray], error: RequestError | None
    ) -> None:
        """Here is what `features.take_wanted` asked of a request, or why there is none, which ends the request."""
        if self._optional_features is None:
            return
        try:
            for request in self.features.supply(output_id, key, inputs, error):
                self.waiting.bring_back(request)
        except FeatureError as failure:
            self._failing.append(failure)

    def abort(self, output_ids: Iterable[str]) -> list[str]:
        """End these requests with all continuations and free their blocks. Unknown ids are ignored.

        Returns the ids of those ended.
        """
        aborted = []
        for output_id in output_ids:
            if continuations := self.requests.continuations(output_id):
                for request in continuations:
                    self._abort(request)
                aborted.append(output_id)
        return aborted

    def abort_continuations(self, continuations: Iterable[tuple[str, int]]) -> None:
        """End single continuations, `(caller's id, index)` each, and free their blocks; the others run on.

        Ignored are those that are unknown, and those of a request that had no output yet: one of them computes the
        prompt for all.
        """
        for output_id, index in continuations:
            request = self.requests.get(continuation_id(output_id, index))
            if request is not None and (request.index > 0 or request.num_output_tokens > 0):
                self._abort(request)

    def _abort(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._finish(request)

    def has_more_to_do(self) -> bool:
        """Whether `schedule` would do more than go on with those that run, or might."""
        if self._failing or self._sharing or (self.num_open_seats > 0 and self.waiting.peek() is not None):
            return True
        if self.turns.is_anyone_ready() or self.slots.has_unloaded():
            return True
        return self._optional_features is not None and self._optional_features.has_work_now()

    def schedule(self) -> Step:
        """Plan one step and allocate its slots. Follow it with `update`, or with `withdraw` if it cannot run.

        Not while a step is running: it may free blocks and look for hits (`ahead.schedule_ahead` does neither).
        """
        step = Step()
        self.kv.release_expired()
        self.slots.clear_unloaded()
        if self._optional_features is not None:
            self.features.begin_step()
            self._failing += self.features.overdue()
        self._end_failing(step)
        if self._optional_features is not None:
            for request in self.features.ask_for_more():
                self.waiting.bring_back(request)
        self._end_waits()
        budget = self._schedule_running(step)
        self._end_waits()
        # Admitting beside a preemption would hand the victim's blocks to a newcomer, and could let it share
        # blocks of a request withdrawn from this very step.
        if not step.preempted:
            for request in self.turns.take_ready():
                self.waiting.bring_back(request)
            self._admit_waiting(step, budget)
        return step

    def _end_failing(self, step: Step) -> None:
        for failure in self._failing:
            output_id = failure.request.output_id
            if self.requests.get(failure.request.request_id) is failure.request and self.abort([output_id]):
                num_cached_tokens = failure.request.num_cached_tokens or 0
                step.failed.append(RequestOutput(output_id, [], num_cached_tokens, "error", error=failure.reason))
        self._failing.clear()

    def _end_waits(self) -> None:
        if self._sharing:
            for request in self._sharing.take_ready():
                self.waiting.bring_back(request)

    def _schedule_running(self, step: Step) -> int:
        budget = self.max_num_batched_tokens
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_tokens = self._chunk(request, request.num_computed_tokens, budget)
            features: Sequence[EncodedFeature] = ()
            if request.num_computed_tokens < request.features_end:
                reach = self.features.reach(request, request.num_computed_tokens, num_tokens, budget)
                if reach.lacks_inputs:
                    # What it found in the encoder cache when it was admitted is gone. It asks when it comes up again.
                    self._preempt(request)
                    step.preempted.append(request)
                    continue
                num_tokens = reach.num_tokens
                loaded = self._load_features(request, request.num_computed_tokens, num_tokens) if num_tokens else None
                if loaded is None:
                    index += 1
                    continue
                features = loaded
            while self.kv.allocate_slots(request, num_tokens) is None:
                victim = self._choose_victim()
                victim_index = self.running.index(victim)
                if victim_index < index:
                    index -= 1
                    budget += step.drop(victim)
                self._preempt(victim)
                step.preempted.append(victim)
                if victim is request:
                    break
            else:
                step.scheduled.append(self._entry(request, num_tokens, features))
                budget -= num_tokens
                index += 1
        return budget

    @property
    def num_open_seats(self) -> int:
        """How many sequences could join those that run; none while the first that waits is known to lack blocks."""
        return 0 if self._first_still_lacks_room() else self.max_num_seqs - len(self.running)

    def _first_still_lacks_room(self) -> bool:
        first = self.waiting.peek()
        return first is not None and self.kv.still_lacks_room(first, self._num_spare_blocks)

    @property
    def _num_spare_blocks(self) -> int:
        return self.num_watermark_blocks if self.running else 0

    def _admit_waiting(self, step: Step, budget: int) -> None:
        num_waits = 0
        while budget > 0 and len(self.running) < self.max_num_seqs and num_waits < MAX_WAITS_PER_STEP:
            request = None if self._first_still_lacks_room() else self.waiting.choose()
            if request is None:
                return
            if request.adapter is not None and not self.turns.may_join(request):
                self.turns.begin_wait(request)
                self.waiting.set_aside(request)
                num_waits += 1
                continue
            hit = self._find_hit(request)
            if self.share_in_flight and self._sharing.begin_wait(request, hit, self.running):
                self.counters.prefix_waits += 1
                self.waiting.set_aside(request)
                num_waits += 1
                continue
            num_tokens = self._admit(step, request, hit, budget)
            if num_tokens is None:
                return
            budget -= num_tokens

    def _admit(self, step: Step, request: Request, hit: PrefixHit, budget: int) -> int | None:
        """Let the first in line run, and say how many tokens it computes in this step; 0 if it is set aside instead.

        None if it has to wait, and everybody behind it.
        """
        num_tokens = self._chunk(request, hit.num_tokens, budget)
        if request.features:
            if not self.features.is_ready(request, hit.num_tokens):
                if request.adapter is not None:
                    self.turns.step_aside(request)
                self.waiting.set_aside(request)
                return 0
            num_tokens = self.features.reach(request, hit.num_tokens, num_tokens, budget).num_tokens
            if num_tokens == 0:
                return None
        if not self.enable_chunked_prefill and hit.num_tokens + num_tokens < request.num_tokens:
            return None
        miss_reason = self.kv.why_missed(request, hit) if request.miss_reason is None else None
        allocated = self.kv.allocate_slots(
            request,
            num_tokens,
            hit,
            reserve_full_sequence=self.reserve_full_sequence,
            num_spare_blocks=self._num_spare_blocks,
        )
        if allocated is None:
            # Free blocks that are copied from take room as well.
            if hit.tail is None or all(block.ref_cnt > 0 for block in hit.tail.blocks):
                return None
            return self._admit(step, request, self.kv.get_computed_blocks(request, whole_blocks_only=True), budget)
        # After the allocation, so that nothing is placed or encoded for who has no room yet.
        features = self._prepare(request, hit.num_tokens, num_tokens)
        if features is None:
            self.kv.withdraw(request)
            self.waiting.set_aside(request)
            return 0
        self.waiting.pop()
        self.running.append(request)
        step.copies += self.kv.copies_for(request)
        request.num_computed_tokens = hit.num_tokens
        if self.kv.enable_caching:
            self.counters.count_admission(request, hit.num_tokens, hit.num_copied_tokens)
        request.status = RequestStatus.RUNNING
        if request.admitted_s is None:
            request.admitted_s = time.monotonic()
        if request.num_cached_tokens is None:
            request.num_cached_tokens = hit.num_tokens
        if miss_reason is not None:
            request.miss_reason = miss_reason
            self.counters.count_miss(miss_reason, request.num_tokens - hit.num_tokens)
        step.scheduled.append(self._entry(request, num_tokens, features))
        return num_tokens

    def _prepare(self, request: Request, start: int, num_tokens: int) -> Sequence[EncodedFeature] | None:
        """The features of who is to be admitted, whose adapter is in a slot then; None if that failed, which will end
        the request.
        """
        if request.adapter is not None:
            try:
                self.turns.take(request)
            except Exception as error:
                logger.exception(
                    "adapter_not_placed request=%s digest=%s", request.output_id, request.adapter.digest.hex()
                )
                reason = f"its adapter could not be placed on the device: {type(error).__name__}: {error}"
                self._failing.append(RequestFailedError(request, RequestError("internal", reason)))
                return None
        features = self._load_features(request, start, num_tokens) if start < request.features_end else ()
        if features is None:
            self.turns.release(request)
        return features

    def _load_features(self, request: Request, start: int, num_tokens: int) -> Sequence[EncodedFeature] | None:
        """None if the encoder failed, which will end the request."""
        try:
            return self.features.load(request, start, num_tokens, self.turns.slot_of(request))
        except FeatureError as failure:
            self._failing.append(failure)
            return None

    def _find_hit(self, request: Request) -> PrefixHit:
        parent = request.parent
        # A parent that was preempted may hold blocks it has not computed again yet.
        if (
            parent is not None
            and request.status is RequestStatus.WAITING
            and parent.status is RequestStatus.RUNNING
            and parent.num_preemptions == 0
        ):
            forked = self.kv.get_forked_blocks(request, parent)
            if forked is not None:
                return forked
        return self.kv.get_computed_blocks(request)

    def _num_cached_blocks(self, request: Request) -> int:
        """At a glance, which what is evicted of a chain may deceive."""
        return self.kv.pool.tree.num_known(request.block_hashes) if request.read_prefix_cache else 0

    def _chunk(self, request: Request, num_computed_tokens: int, budget: int) -> int:
        num_tokens = request.num_tokens - num_computed_tokens
        if 0 < self.long_prefill_token_threshold < num_tokens and self._want_others_to_run():
            num_tokens = self.long_prefill_token_threshold
        return min(num_tokens, budget)

    def _want_others_to_run(self) -> bool:
        """Beside one request. Those that wait for a prefix want it computed soon, whole."""
        return len(self.requests) - len(self._sharing) > 1

    def _entry(self, request: Request, num_tokens: int, features: Sequence[EncodedFeature]) -> ScheduledRequest:
        table = self.kv.tables[request.request_id]
        return ScheduledRequest(
            request,
            request.num_computed_tokens,
            num_tokens,
            table.block_tables,
            table.num_shared_blocks,
            features,
            adapter_slot=self.turns.slot_of(request),
        )

    def _choose_victim(self) -> Request:
        if self.policy == "priority":
            # Of equals the last one: if continuations of one request took turns, none would get on.
            return max(reversed(self.running), key=lambda request: (request.priority, request.arrival_time_s))
        return self.running[-1]

    def _preempt(self, request: Request) -> None:
        self.kv.withdraw(request)
        if request.features:
            self.features.unpin(request)
        self.turns.release(request)
        self.running.remove(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        # Its time may be over before the prompt is computed again.
        request.num_kept_tokens = ()
        if request.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        request.num_preemptions += 1
        self.counters.preemptions += 1
        self.waiting.put_back(request)

    def update(self, step: Step, result: StepResult, ahead: Step | None = None) -> list[RequestOutput]:
        """The step has run: append what was sampled, finish who is done. One output per sampled token.

        Nothing is made of the tokens of requests that were aborted or preempted since it was scheduled. `ahead` is the
        step launched behind it: blocks that its tokens fill can be found from now on.
        """
        self.kv.commit_step()
        self.counters.count_step(step.num_tokens)
        now_s = time.monotonic()
        outputs = []
        finished = False
        for place, (entry, token_id) in enumerate(zip(step.scheduled, result.token_ids, strict=True)):
            request = entry.request
            if request.status is not RequestStatus.RUNNING:
                continue
            request.num_computed_tokens += entry.num_tokens
            if entry.start < request.features_end:
                self.features.unpin_computed(request)
            if place in result.prompt_logprobs and request.prompt_logprobs is not None:
                request.prompt_logprobs += result.prompt_logprobs[place]
            if token_id is None:
                continue
            request.token_ids.append(token_id)
            self.counters.generated_tokens += 1
            is_first = request.first_token_s is None
            if is_first:
                request.first_token_s = now_s
            if request.keep and request.index == 0 and not request.num_kept_tokens:
                request.num_kept_tokens = self.kv.keep_prompt(request)
            # Before this token's block is hashed: the others share the prompt's hashes, not that of its first output.
            if request.index == 0 and request.num_output_tokens == 1 and request.sampling_params.n > 1:
                self._fork(request)
            fills_block = len(request.token_ids) % self.kv.block_size == 0
            if fills_block:
                self.hash_blocks(request)
            ending = finish_reason(request, token_id, self.eos_token_ids, self.max_model_len)
            if fills_block and ahead is not None and ending[0] is None:
                self.kv.register_known(request)
            logprobs = None if request.sampling_params.logprobs is None else result.logprobs[place]
            output = token_output(request, token_id, ending, logprobs, now_s, is_first=is_first)
            outputs.append(output)
            if output.finish_reason is not None:
                self._finish(request)
                output.num_unfinished = len(self.requests.continuations(request.output_id))
                finished = True
        if finished:
            self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]
        return outputs

    def _fork(self, request: Request) -> None:
        """The prompt is computed: let the other continuations of it be admitted next."""
        for index in reversed(range(1, request.sampling_params.n)):
            child = request.fork(index)
            self.requests.add(child)
            self.waiting.put_back(child)

    def withdraw(self, step: Step) -> list[RequestOutput]:
        """The step failed: end its requests, all continuations, and forget what it registered. A step launched behind
        it has failed with it.

        Requests that were aborted or preempted since it was scheduled are none of its. Returns one output, to be
        completed with the error, for each request ended.
        """
        self.kv.withdraw_step()
        failed = {
            entry.request.output_id: entry.request.num_cached_tokens or 0
            for entry in step.scheduled
            if entry.request.status is RequestStatus.RUNNING
        }
        return [RequestOutput(output_id, [], failed[output_id], "error") for output_id in self.abort(failed)]

    def preempt_all(self) -> None:
        """Give up the blocks of every running request, the last admitted first; they wait to be computed again."""
        for request in reversed(self.running.copy()):
            self._preempt(request)

    def _finish(self, request: Request) -> None:
        self.kv.free(request)
        self._sharing.forget(request)
        self.turns.forget(request)
        if request.features:
            self.features.forget(request)
        request.status = RequestStatus.FINISHED
        self.requests.remove(request)
