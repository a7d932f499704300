"""Random operations on an engine with a real model and real adapters, whose every answer is compared with PEFT's.

What an answer should be is asked of the merged weights, one whole sequence at a time; how much of a prompt may have
been found in the cache, of a list of all that was ever computed, by adapter and salt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine_core import EngineCore, EngineRequest, SamplingParams
from engine_core.errors import AdapterError
from engine_core.model.device_queue import DeviceQueue
from ipc.vocabulary import ExtraKeySpan, KeepPrefix, MultimodalFeature, TokenLogprob
from tests.engine_core.test_engine import assert_idle

from .adapted import merged_model
from .equality import (
    LOGPROB_TOLERANCE,
    UNDECIDED_GAP,
    EngineRun,
    NotEqualError,
    Reference,
    generate_reference_from,
    greedy,
    load_reference_model,
    make_engine,
    num_alike,
    poison_unowned_slots,
    run_requests,
)
from .picture_prompts import PicturePrompt, PromptMaker

NO_WEIGHTS = ""
NAMES = ("a", "b", "c", "d", "e", "f")
MAX_OUTPUT_TOKENS = 12
FIRST_TOKEN_ID, VOCAB_SIZE = 3, 512


@dataclass(frozen=True)
class Question:
    """A prompt; `contents` tell tokens apart that are the same, by position."""

    token_ids: list[int]
    contents: Sequence[object]
    spans: tuple[ExtraKeySpan, ...] = ()
    features: tuple[MultimodalFeature, ...] = ()
    inputs: Mapping[bytes, Mapping[str, np.ndarray]] = field(default_factory=dict)


class Texts:
    """Questions that begin alike, for as long as you like, and what they should be answered."""

    def __init__(self, directory: Path, adapters: Mapping[str, Path]) -> None:
        self.directory, self.adapters = directory, adapters
        self._models = {NO_WEIGHTS: load_reference_model(directory)}
        self._models |= {weights: merged_model(directory, path) for weights, path in adapters.items()}
        draw = random.Random(0)
        self._documents = [[draw.randrange(FIRST_TOKEN_ID, VOCAB_SIZE) for _ in range(70)] for _ in range(2)]
        self._logits: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self.num_compared = 0

    def question(self, rng: random.Random, room: int) -> Question:
        document = rng.choice(self._documents)
        tail = [rng.randrange(FIRST_TOKEN_ID, VOCAB_SIZE) for _ in range(rng.choice([0, 0, 1, 3]))]
        return self.of((document[: rng.randint(1, len(document))] + tail)[:room])

    def next_turn(self, question: Question, answer: Sequence[int], rng: random.Random, room: int) -> Question:
        return self.of([*question.token_ids, *answer, rng.randrange(FIRST_TOKEN_ID, VOCAB_SIZE)][:room])

    def of(self, token_ids: list[int]) -> Question:
        return Question(token_ids, [None] * len(token_ids))

    def check(self, question: Question, weights: str, answer: Sequence[int]) -> None:
        """Raises NotEqualError, up to the first token that is a matter of rounding."""
        if not answer:
            return
        logits = self._logits_of(weights, [*question.token_ids, *answer[:-1]])[len(question.token_ids) - 1 :]
        top = logits.topk(2)
        for place, (token, (first, second), (best, _)) in enumerate(
            zip(answer, top.values.tolist(), top.indices.tolist(), strict=True)
        ):
            if first - second < UNDECIDED_GAP:
                return
            if token != best:
                raise NotEqualError(f"token {place} of {answer} is not {best}, which has a lead of {first - second}")
            self.num_compared += 1

    def check_prompt(self, question: Question, weights: str, found: Sequence[TokenLogprob | None]) -> None:
        logprobs = self._logits_of(weights, question.token_ids).log_softmax(dim=-1)
        assert len(found) == len(question.token_ids) and found[0] is None
        for place, (entry, token) in enumerate(zip(found[1:], question.token_ids[1:], strict=True)):
            assert entry is not None
            if abs(entry.logprob - logprobs[place, token].item()) > LOGPROB_TOLERANCE:
                raise NotEqualError(f"prompt token {place + 1} has another log-probability")

    @torch.inference_mode()
    def _logits_of(self, weights: str, token_ids: list[int]) -> torch.Tensor:
        key = weights, tuple(token_ids)
        if key not in self._logits:
            self._logits[key] = self._models[weights](input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
        return self._logits[key]


class Rounded(Texts):
    """Where K/V is kept in fewer bits: answers are those of an engine that has the merged weights and nobody else."""

    # A number that is rounded to the next step in one of two engines changes logits by about as much.
    UNDECIDED_GAP = 0.2

    def __init__(self, directory: Path, adapters: Mapping[str, Path], root: Path, **settings: Any) -> None:
        super().__init__(directory, adapters)
        self._alone = {}
        for weights, model in self._models.items():
            merged = root / (weights or "base")
            model.save_pretrained(merged)
            self._alone[weights] = make_engine(merged, max_model_len=96, enable_prefix_caching=False, **settings)
        self._runs: dict[tuple[str, tuple[int, ...]], EngineRun] = {}

    def check(self, question: Question, weights: str, answer: Sequence[int]) -> None:
        key = weights, tuple(question.token_ids)
        if key not in self._runs:
            room = 96 - len(question.token_ids)
            request = EngineRequest("alone", question.token_ids, greedy(min(MAX_OUTPUT_TOKENS, room)))
            [self._runs[key]] = run_requests(self._alone[weights], [(request, {})])
        run = self._runs[key]
        for place, token in enumerate(answer):
            first, second = run.logprobs[place].topk(2).values.tolist()
            if first - second < self.UNDECIDED_GAP:
                return
            if token != run.token_ids[place]:
                raise NotEqualError(f"token {place} of {answer} is not {run.token_ids[place]}")
            self.num_compared += 1

    def check_prompt(self, question: Question, weights: str, found: Sequence[TokenLogprob | None]) -> None:
        assert len(found) == len(question.token_ids)


class Pictures:
    """The same for a few prompts with pictures."""

    KINDS = ("one", "one spot changed", "another question", "first and last", "text")

    def __init__(self, family: str, directory: Path, adapters: Mapping[str, Path]) -> None:
        self.directory, self.adapters = directory, adapters
        self._models = {NO_WEIGHTS: load_reference_model(directory)}
        self._models |= {weights: merged_model(directory, path) for weights, path in adapters.items()}
        maker = PromptMaker(family, directory)
        self._prompts = {kind: maker.make(kind, 0) for kind in self.KINDS}
        self._references: dict[tuple[str, tuple[int, ...], bytes], Reference] = {}
        self.num_compared = 0

    def question(self, rng: random.Random, room: int) -> Question:
        prompt = self._prompts[rng.choice(self.KINDS)]
        assert len(prompt.token_ids) <= room
        contents: list[object] = [None] * len(prompt.token_ids)
        for span in prompt.spans:
            assert span.end is not None
            contents[span.start : span.end] = [span.key] * (span.end - span.start)
        return Question(prompt.token_ids, contents, prompt.spans, prompt.features, prompt.inputs)

    def next_turn(self, question: Question, answer: Sequence[int], rng: random.Random, room: int) -> Question:
        return question

    def check(self, question: Question, weights: str, answer: Sequence[int]) -> None:
        reference = self._reference(question, weights)
        comparable = min(reference.num_comparable, len(answer))
        if list(answer[:comparable]) != reference.output_token_ids[:comparable]:
            raise NotEqualError(f"{answer} is not {reference.output_token_ids}")
        self.num_compared += comparable

    def check_prompt(self, question: Question, weights: str, found: Sequence[TokenLogprob | None]) -> None:
        assert len(found) == len(question.token_ids)

    def _reference(self, question: Question, weights: str) -> Reference:
        [prompt] = [prompt for prompt in self._prompts.values() if _is_of(prompt, question)]
        key = weights, tuple(prompt.token_ids), b"".join(feature.key for feature in prompt.features)
        if key not in self._references:
            self._references[key] = generate_reference_from(
                self._models[weights], prompt.reference_inputs, MAX_OUTPUT_TOKENS
            )
        return self._references[key]


def _is_of(prompt: PicturePrompt, question: Question) -> bool:
    return prompt.token_ids is question.token_ids


@dataclass
class Asked:
    """`weights` are those of the adapter that bore its name when it was asked. `outputs` are by continuation."""

    request: EngineRequest
    question: Question
    weights: str
    secret: tuple[str, str]
    outputs: dict[int, list[int]]
    is_over: bool = False

    @property
    def sequence(self) -> list[object]:
        """What may be cached of it."""
        answer = max(self.outputs.values(), key=len)
        return [
            *zip(self.question.token_ids, self.question.contents, strict=True),
            *((token, None) for token in answer),
        ]


class Workload:
    """One engine with random settings, driven at random.

    Args:
        source: what is asked.
        settings: that are not to be random.
        queue: of a device that computes by itself.
        in_threads: adapters are loaded by two other threads, whenever they get to it.
    """

    def __init__(
        self,
        rng: random.Random,
        source: Texts | Pictures,
        settings: Mapping[str, Any],
        queue: DeviceQueue | None = None,
        *,
        in_threads: bool = False,
    ) -> None:
        self.rng, self.source = rng, source
        max_num_seqs = rng.choice([1, 4, 6, 8])
        block_size = rng.choice([1, 2, 4, 8, 16])
        chunked = rng.random() < 0.8
        self.settings: dict[str, Any] = {
            "enable_lora": True,
            "max_loras": rng.choice([1, 1, 2, 3]),
            "max_lora_rank": 16,
            "max_cpu_loras": 5,
            "max_model_len": 96,
            "block_size": block_size,
            "num_blocks": rng.choice([100, 300, 600]) // block_size + 2,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_seqs + rng.randint(1, 40) if chunked else 96,
            "enable_chunked_prefill": chunked,
            "scheduling_policy": rng.choice(["fcfs", "priority", "prefix"]),
            "reserve_full_sequence": rng.random() < 0.4,
            "prefix_match_unit": rng.choice(["token", "token", "block"]),
            "full_prompt_hit": rng.choice(["recompute_last_token", "drop_last_block"]),
            "prefix_caching_hash_algo": rng.choice(["sha256", "sha256_cbor", "xxhash"]),
            "eviction_policy": rng.choice(["lru", "unhashed_first", "frequency"]),
            "window_retention": rng.choice(["all", "prompt_tail"]),
            "fuse_layers": rng.random() < 0.7,
            "max_kept_share": 0.5,
        }
        self.settings |= settings
        self.engine: EngineCore = make_engine(source.directory, queue, **self.settings)
        self.weights_of: dict[str, str] = {
            self.engine.runner.read_adapter(path).digest.hex(): weights for weights, path in source.adapters.items()
        }
        assert len(self.weights_of) == len(source.adapters)
        self.names: dict[str, str] = {}
        self.asked: dict[str, Asked] = {}
        self.computed: list[Asked] = []
        self.unadmitted: set[str] = set()
        self.num_hits = self.num_hits_under_another_name = 0
        self.loaders = ThreadPoolExecutor(2) if in_threads else None
        self.loads: list[Future[Any]] = []
        for _ in range(4):
            self.load()

    # What may happen

    def load(self) -> None:
        name, weights = self.rng.choice(NAMES), self.rng.choice(list(self.source.adapters))
        replaces = self.rng.random() < 0.6
        path = self.source.adapters[weights]
        if self.loaders is not None:
            self.loads.append(self.loaders.submit(self.engine.load_adapter, name, path, replaces=replaces))
            return
        refusal = None
        if name not in self.names and len(self.names) == self.settings["max_cpu_loras"]:
            refusal = "too_many_adapters"
        elif self.names.get(name, weights) != weights and not replaces:
            refusal = "name_taken"
        try:
            self.engine.load_adapter(name, path, replaces=replaces)
        except AdapterError as error:
            said = error.reason
        else:
            said = None
            self.names[name] = weights
        assert said == refusal

    def unload(self) -> None:
        names = [info.name for info in self.engine.adapters()]
        if names:
            name = self.rng.choice(names)
            self.engine.unload_adapter(name)
            self.names.pop(name, None)

    def add_some(self) -> None:
        for _ in range(self.rng.choice([1, 1, 2, 5])):
            self.add()

    def add(self) -> None:
        rng = self.rng
        room = self.engine.capabilities.max_model_len - 1
        question = self.source.question(rng, room)
        names = [info.name for info in self.engine.adapters()]
        name = rng.choice(["", *names, *names])
        salt = rng.choice(["", "", "", "", "", "", "salt", *names[:1]])
        if self.asked and rng.random() < 0.3:
            before = rng.choice(list(self.asked.values()))
            question = self.source.next_turn(before.question, before.outputs[0], rng, room)
            if before.request.adapter in names and rng.random() < 0.7:
                name, salt = before.request.adapter, before.secret[1]
        num_tokens = len(question.token_ids)
        wants_logprobs = rng.random() < 0.08
        params = SamplingParams(
            temperature=0.0,
            max_tokens=min(rng.randint(1, MAX_OUTPUT_TOKENS), room + 1 - num_tokens),
            ignore_eos=True,
            n=rng.choice([1, 1, 1, 1, 2, 3]),
            prompt_logprobs=0 if wants_logprobs else None,
        )
        writes = rng.random() < 0.9
        keep = [KeepPrefix(rng.randint(1, num_tokens), 1000.0, 0)] if writes and rng.random() < 0.1 else []
        request = EngineRequest(
            f"r{len(self.asked)}",
            question.token_ids,
            params,
            extra_key_spans=question.spans + ((ExtraKeySpan(0, 1, "cache_salt", salt),) if salt else ()),
            mm_features=question.features,
            priority=rng.randrange(3),
            arrival_time_s=float(len(self.asked)),
            read_prefix_cache=rng.random() < 0.9,
            write_prefix_cache=writes,
            keep=tuple(keep),
            adapter=name,
        )
        self.engine.add_request(request, question.inputs)
        adapter = self.engine._scheduler.requests[request.request_id].adapter
        weights = NO_WEIGHTS if adapter is None else self.weights_of[adapter.digest.hex()]
        if self.loaders is None:
            assert weights == self.names.get(name, NO_WEIGHTS)
        asked = Asked(request, question, weights, (weights, salt), {index: [] for index in range(params.n)})
        self.asked[request.request_id] = asked
        self.unadmitted.add(request.request_id)
        if writes:
            self.computed.append(asked)

    def step(self) -> None:
        if self.rng.random() < 0.1:
            poison_unowned_slots(self.engine)
        outputs = self.engine.step().outputs
        for output in outputs:
            assert output.error is None, output.error
            asked = self.asked[output.request_id]
            asked.outputs[output.index] += output.new_token_ids
            if output.prompt_logprobs:
                self.source.check_prompt(asked.question, asked.weights, output.prompt_logprobs)
            if output.ends_request:
                asked.is_over = True
        found = {output.request_id: output.num_cached_tokens for output in outputs}
        for request_id in list(self.unadmitted):
            request = self.engine._scheduler.requests.get(request_id)
            num_cached = found.get(request_id) if request is None else request.num_cached_tokens
            if num_cached is not None:
                self.unadmitted.remove(request_id)
                self.check_hit(self.asked[request_id], num_cached)

    def check_hit(self, asked: Asked, num_cached_tokens: int) -> None:
        if not asked.request.read_prefix_cache or asked.request.sampling_params.prompt_logprobs is not None:
            assert num_cached_tokens == 0
            return
        wanted = asked.sequence[: len(asked.question.token_ids) - 1]
        most, whose = 0, asked.request.adapter
        for other in self.computed:
            if other is not asked and other.secret == asked.secret:
                common = num_alike(wanted, other.sequence)
                if common > most or (common == most and other.request.adapter == asked.request.adapter):
                    most, whose = common, other.request.adapter
        if num_cached_tokens > most:
            raise NotEqualError(f"{num_cached_tokens} tokens of {asked.request} are cached, {most} were ever computed")
        self.num_hits += num_cached_tokens > 0 and bool(asked.weights)
        self.num_hits_under_another_name += num_cached_tokens > 0 and whose != asked.request.adapter

    def abort(self) -> None:
        ids = [request_id for request_id, asked in self.asked.items() if not asked.is_over]
        if ids:
            request_id = self.rng.choice(ids)
            self.engine.abort_requests([request_id])
            self.asked[request_id].is_over = True
            self.unadmitted.discard(request_id)

    def abort_continuation(self) -> None:
        unfinished = list(self.engine._scheduler.requests.values())
        if unfinished:
            request = self.rng.choice(unfinished)
            self.engine.abort_continuations([(request.output_id, request.index)])

    def reset(self) -> None:
        self.engine.reset_prefix_cache(reset_running_requests=self.rng.random() < 0.5)
        self.computed = [asked for asked in self.computed if not asked.is_over]

    def run(self, num_operations: int) -> None:
        operations: dict[Callable[[], None], int] = {
            self.add_some: 22,
            self.step: 70,
            self.load: 6,
            self.unload: 2,
            self.abort: 2,
            self.abort_continuation: 2,
            self.reset: 1,
        }
        for operation in self.rng.choices(list(operations), list(operations.values()), k=num_operations):
            operation()
        self.finish()

    def finish(self) -> None:
        if self.loaders is not None:
            self.loaders.shutdown()
            for load in self.loads:
                error = load.exception()
                assert error is None or isinstance(error, AdapterError)
        for _ in range(len(self.asked) * 200 + 1):
            if not self.engine.has_unfinished_requests():
                break
            assert self.engine.has_work_now()
            self.step()
        assert_idle(self.engine)
        for asked in self.asked.values():
            for output in asked.outputs.values():
                self.source.check(asked.question, asked.weights, output)
        for info in self.engine.adapters():
            self.engine.unload_adapter(info.name)
        self.engine.step()
        assert not self.engine.has_work_now()


def goes_wrong(make: Callable[[int], Workload], *, num_operations: int = 120, max_rounds: int = 10) -> bool:
    """Whether one of the workloads that `make` makes gives a wrong answer."""
    try:
        for number in range(max_rounds):
            make(number).run(num_operations)
    except NotEqualError:
        return True
    return False
