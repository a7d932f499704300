"""Random operations on a whole engine whose prompts have pictures, with every KV slot and every row checked.

Inputs come late, wrong, too large, twice, unasked or never; caches are tiny; encoders and steps fail.
"""

from __future__ import annotations

import random
import time
from typing import Any, get_args

import numpy as np
import pytest

from engine_core import EngineOverloadedError, EngineRequest, InvalidRequestError, RequestError, SamplingParams
from engine_core.config import SchedulingPolicy
from engine_core.runner import MultimodalInfo
from ipc.vocabulary import ExtraKeySpan, MultimodalFeature, WantedFeature
from tests.engine_core.test_random_operations import VOCAB, Workload, run_for
from tests.feature_prompts import EMBED_BYTES, content_of, inputs_by_key, inputs_of, mm_spans, prompt_of

MAX_ROWS = 7
TIMEOUT_S = 50


class PicturesWorkload(Workload):
    def __init__(self, rng: random.Random, policy: str) -> None:
        self.joins_touching = rng.random() < 0.4
        super().__init__(rng, policy)
        self.now_s = 0.0
        manager = self.engine._features
        assert manager is not None
        self.manager = manager
        manager.inputs._clock = lambda: self.now_s
        self.wanted: list[WantedFeature] = []
        self.features: dict[bytes, MultimodalFeature] = {}
        self.refused = 0

    def more_settings(self) -> dict[str, Any]:
        rng = self.rng
        chunked = rng.random() < 0.8
        return {
            "enable_chunked_prefill": chunked,
            "long_prefill_token_threshold": rng.choice([0, 3]) if chunked else 0,
            "encoder_cache_bytes": EMBED_BYTES * rng.choice([7, 14, 15, 30, 1000]),
            "max_num_encoder_tokens": rng.choice([None, 1, 8]),
            "max_feature_input_bytes": rng.choice([1, 60, 120, 10_000]),
            "feature_timeout_s": TIMEOUT_S,
        }

    def multimodal(self) -> MultimodalInfo:
        return MultimodalInfo(EMBED_BYTES, self.joins_touching)

    def add_pictures(self) -> None:
        rng, room = self.rng, self.engine.capabilities.max_model_len
        tenant = rng.choice(["", "", "a", "b"])
        parts: list[Any] = [rng.choices(range(3, VOCAB), k=rng.randrange(3))]
        for _ in range(rng.randint(1, 5)):
            parts.append(rng.randrange(12))
            parts.append([40] * rng.choice([0, 0, 1, 3]))
        token_ids, features = prompt_of(parts, tenant)
        if len(token_ids) >= room:
            return
        spans = mm_spans(features, joins_touching=self.joins_touching)
        if tenant:
            spans += (ExtraKeySpan(0, 1, "cache_salt", tenant),)
        request = EngineRequest(
            f"r{self.num_added}",
            token_ids,
            SamplingParams(
                temperature=0.0,
                max_tokens=rng.randint(1, room),
                n=rng.choice([1, 1, 1, 2, 3]),
                prompt_logprobs=rng.choice([None] * 9 + [0]),
            ),
            spans,
            priority=rng.randrange(3),
            arrival_time_s=float(self.num_added),
            read_prefix_cache=rng.random() < 0.9,
            mm_features=tuple(features),
            **self.more_fields(len(token_ids)),
        )
        self.num_added += 1
        inputs = {
            key: value for key, value in inputs_by_key(features).items() if rng.random() < rng.choice([0, 0, 0.5, 1])
        }
        try:
            self.engine.add_request(request, inputs)
        except EngineOverloadedError:
            return
        except InvalidRequestError as error:
            if error.param != "mm_features":
                raise
            self.refused += 1
            return
        self.remember(request)
        self.features |= {feature.key: feature for feature in features}

    def supply(self) -> None:
        rng = self.rng
        self.take()
        for item in rng.sample(self.wanted, rng.randint(0, len(self.wanted))):
            if rng.random() < 0.95:
                self.wanted.remove(item)
            feature = self.features[item.key]
            choice = rng.random()
            if choice < 0.03:
                self.engine.supply_feature(item.request_id, item.key, {}, RequestError("internal", "no such file"))
            elif choice < 0.06:
                wrong = np.arange(rng.choice([0, MAX_ROWS + 1]))  # none, or more than any picture has
                self.engine.supply_feature(item.request_id, item.key, {"pixels": wrong})
            elif choice < 0.08:
                self.wanted = [other for other in self.wanted if other is not item]  # it never comes
            else:
                self.engine.supply_feature(item.request_id, item.key, inputs_of(feature))

    def take(self) -> None:
        wanted = self.engine.take_wanted()
        assert len(set(wanted)) == len(wanted)
        self.wanted += wanted

    def supply_unasked(self) -> None:
        if self.features and self.produced:
            request_id, key = self.rng.choice(list(self.produced)), self.rng.choice(list(self.features))
            if not any(item.request_id == request_id and item.key == key for item in self.wanted):
                self.engine.supply_feature(request_id, key, inputs_of(self.features[key]))

    def encoder_fails(self) -> None:
        if self.features:
            key = self.rng.choice(list(self.features))
            self.runner.encoder_fails = {key: self.rng.choice([ValueError("odd"), RuntimeError("out of memory")])}

    def encoder_recovers(self) -> None:
        self.runner.encoder_fails = {}

    def wait(self) -> None:
        super().wait()
        self.now_s += self.rng.choice([1, 10, TIMEOUT_S])

    def step(self) -> None:
        had_work, had_time = self.engine.has_work_now(), self.now_s
        before = self.engine.stats()
        super().step()
        after = self.engine.stats()
        self.now_s = had_time + 0.1
        if not had_work:
            assert after.steps == before.steps
            if self.rng.random() < 0.5:
                self.supply()
        rows = self.manager._num_encoded_rows
        limit = self.config.max_num_encoder_tokens or self.config.max_num_batched_tokens
        if not self.joins_touching and self.config.enable_chunked_prefill:
            assert rows <= max(limit, MAX_ROWS)
        assert max(self.runner.steps, default=0) <= self.config.max_num_batched_tokens
        held = [entry.num_bytes for entry in self.manager.inputs._entries.values()]
        assert self.manager.inputs.num_bytes == sum(held)
        assert self.manager.cache.used_bytes <= self.manager.cache.capacity_bytes
        waiting = self.engine._scheduler.waiting
        assert after.num_waiting == len(waiting)

    def operations(self) -> dict:
        return super().operations() | {
            self.add: 5,
            self.add_pictures: 25,
            self.supply: 30,
            self.supply_unasked: 3,
            self.encoder_fails: 1,
            self.encoder_recovers: 2,
            self.wait: 2,
        }

    def run(self, num_operations: int) -> None:
        super().run(num_operations)
        self.take()
        assert self.manager.is_idle()
        assert not self.engine.has_work_now()
        assert self.engine.stats().feature_input_bytes == 0
        assert set(self.runner.encoded) <= {content_of(feature) for feature in self.features.values()}


@pytest.mark.parametrize("policy", get_args(SchedulingPolicy))
def test_random_operations_on_pictures_leave_an_idle_engine_and_right_outputs(policy: str):
    assert run_for(1.5, policy, seed=1, make=PicturesWorkload) > 3


@pytest.mark.slow
@pytest.mark.parametrize("policy", get_args(SchedulingPolicy))
def test_sixty_seconds_of_random_operations_on_pictures(policy: str):
    assert run_for(60.0, policy, seed=time.time_ns(), make=PicturesWorkload) > 100
