"""Pictures whose tokens see each other: a Gemma 3 computes over our cache what transformers computes without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine_core.model.attention import PagedKV
from engine_core.model.input_batch import build_input_batch, lay_out
from engine_core.model.kv_groups import group_layers
from engine_core.model.kv_pool import KVPool, PoolLayout
from engine_core.model.loader import _model_class, load_config, load_model
from engine_core.model.picture_groups import joins_touching
from engine_core.model.probe import probe_layers
from engine_core.model.staging import HostStaging
from engine_core.model.support import UnsupportedModelError
from engine_core.request import Request
from engine_core.runner import EncodedFeature, ScheduledRequest
from ipc.vocabulary import EngineRequest, MultimodalFeature

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_BLOCKS = 64
IMAGE_TOKEN_ID = 250
PICTURE_TOKENS = 16
WINDOW = 10  # less than a picture
TOLERANCE = 1e-4


def tiny_gemma3_config() -> transformers.Gemma3Config:
    return transformers.Gemma3Config(
        text_config={
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "tie_word_embeddings": False,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        },
        mm_tokens_per_image=PICTURE_TOKENS,
        image_token_id=IMAGE_TOKEN_ID,
        boi_token_id=251,
        eoi_token_id=252,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma3")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.Gemma3ForConditionalGeneration(tiny_gemma3_config())
        # Nothing but zeros otherwise: all pictures would be alike.
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reference(directory: Path) -> transformers.PreTrainedModel:
    torch.set_float32_matmul_precision("highest")
    model = transformers.Gemma3ForConditionalGeneration.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.generation_config = transformers.GenerationConfig()
    return model.eval()


@dataclass
class Prompt:
    """Token ids, and a picture `[3, 16, 16]` for each run of placeholders."""

    token_ids: list[int]
    pictures: torch.Tensor
    features: list[MultimodalFeature]

    def expected(self, model: transformers.PreTrainedModel, num_tokens: int = 0) -> tuple[list[int], torch.Tensor]:
        """What transformers generates greedily, and the log-probabilities of all positions, the generated included."""
        inputs = {"input_ids": torch.tensor([self.token_ids])}
        if self.features:
            inputs["pixel_values"] = self.pictures
        generated: list[int] = []
        if num_tokens:
            sequence = model.generate(
                **inputs,
                attention_mask=torch.ones_like(inputs["input_ids"]),
                token_type_ids=picture_types(inputs["input_ids"]),
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                pad_token_id=0,
            )
            generated = sequence[0, len(self.token_ids) :].tolist()
            inputs["input_ids"] = sequence
        logits = model(**inputs, token_type_ids=picture_types(inputs["input_ids"])).logits[0]
        return generated, logits.log_softmax(dim=-1)


def picture_types(input_ids: torch.Tensor) -> torch.Tensor:
    return (input_ids == IMAGE_TOKEN_ID).long()


def make_prompt(*parts: int | str, seed: int = 0) -> Prompt:
    """Numbers are so many tokens of text, "picture" is one."""
    generator = torch.Generator().manual_seed(seed)
    token_ids: list[int] = []
    features = []
    for part in parts:
        if part == "picture":
            features.append(
                MultimodalFeature(
                    bytes([seed, *[len(features)] * 31]),
                    len(token_ids),
                    PICTURE_TOKENS,
                    ((0, PICTURE_TOKENS),),
                    num_input_bytes=1,
                )
            )
            token_ids += [IMAGE_TOKEN_ID] * PICTURE_TOKENS
        else:
            token_ids += torch.randint(3, 240, (int(part),), generator=generator).tolist()
    return Prompt(token_ids, torch.randn(len(features), 3, 16, 16, generator=generator), features)


@dataclass
class Decoder:
    """The model as a runner would drive it: a paged cache that is NaN where nothing was written."""

    model: Any
    config: Any
    joins: bool = True
    pool: KVPool = field(init=False)

    def __post_init__(self) -> None:
        shapes = probe_layers(self.model, self.config)
        groups = group_layers(shapes, 4096, one_group=True)
        self.pool = PoolLayout(shapes, groups, BLOCK_SIZE, torch.float32).allocate(NUM_BLOCKS, torch.device("cpu"))
        for tensor in self.pool.tensors:
            tensor.fill_(float("nan"))

    def schedule(
        self, prompt: Prompt, start: int, end: int, first_block: int, generated: Sequence[int] = (), num_shared: int = 0
    ) -> ScheduledRequest:
        """Tokens `[start, end)`, in blocks that are neighbours, backwards."""
        request = Request(EngineRequest("r", [*prompt.token_ids, *generated]), max_tokens=1, seed=0, arrival_time_s=0.0)
        rows = self.model.get_image_features(prompt.pictures).pooler_output if prompt.features else []
        features = [
            EncodedFeature(feature, output)
            for feature, output in zip(prompt.features, rows, strict=True)
            if feature.start < end and feature.end > start
        ]
        blocks = [first_block - i for i in range(-(-end // BLOCK_SIZE))]
        return ScheduledRequest(request, start, end - start, [blocks], num_shared, features)

    def compute(self, *batch: ScheduledRequest) -> list[torch.Tensor]:
        """Log-probabilities of each request's tokens in this step."""
        inputs = build_input_batch(
            batch,
            lay_out(batch, [None], BLOCK_SIZE, None),
            block_size=BLOCK_SIZE,
            dtype=torch.float32,
            staging=HostStaging(),
            joins_touching=self.joins,
        )
        embeds = self.model.get_input_embeddings()(inputs.input_ids)
        for item, row in zip(batch, inputs.metadata[0].query_start_loc.tolist()):
            for encoded in item.features:
                for place in range(encoded.feature.num_tokens):
                    if item.start <= encoded.feature.start + place < item.start + item.num_tokens:
                        embeds[0, row + encoded.feature.start + place - item.start] = encoded.output[place]
        logits = self.model(
            inputs_embeds=embeds,
            position_ids=inputs.position_ids,
            use_cache=False,
            layer_kv=PagedKV(self.pool, inputs.metadata),
        ).logits[0]
        return list(logits.log_softmax(dim=-1).split([item.num_tokens for item in batch]))

    def difference(self, expected: torch.Tensor, *steps: ScheduledRequest) -> float:
        """The most that any step's log-probabilities are off, computed one after the other."""
        return max(
            (self.compute(step)[0] - expected[step.start : step.start + step.num_tokens]).abs().max().item()
            for step in steps
        )


@pytest.fixture
def decoder(directory: Path) -> Decoder:
    config = load_config(directory)
    assert joins_touching(_model_class(config), config)
    with torch.inference_mode():
        return Decoder(load_model(directory, config, torch.float32, CPU), config)


PROMPTS = {
    "one picture": make_prompt(7, "picture", 9),
    "two that touch": make_prompt(5, "picture", "picture", 6),
    "nothing before": make_prompt("picture", 3),
    "some that touch and some that do not": make_prompt(2, "picture", 1, "picture", "picture", 4, "picture", 11),
}


@pytest.mark.parametrize("name", PROMPTS)
@torch.inference_mode()
def test_a_whole_prompt_and_what_is_generated(
    name: str, decoder: Decoder, reference: transformers.PreTrainedModel
) -> None:
    prompt = PROMPTS[name]
    tokens, expected = prompt.expected(reference, num_tokens=12)
    length = len(prompt.token_ids)
    [logprobs] = decoder.compute(decoder.schedule(prompt, 0, length, first_block=40))
    torch.testing.assert_close(logprobs, expected[:length], atol=TOLERANCE, rtol=0)
    generated = [int(logprobs[-1].argmax())]
    while len(generated) < len(tokens):
        end = length + len(generated)
        [logprobs] = decoder.compute(decoder.schedule(prompt, end - 1, end, 40, generated))
        torch.testing.assert_close(logprobs, expected[end - 1 : end], atol=TOLERANCE, rtol=0)
        generated.append(int(logprobs[-1].argmax()))
    assert generated == tokens


@torch.inference_mode()
def test_in_chunks_that_end_between_groups(decoder: Decoder, reference: transformers.PreTrainedModel) -> None:
    prompt = PROMPTS["some that touch and some that do not"]
    length = len(prompt.token_ids)
    _, expected = prompt.expected(reference)
    borders = [0, 1, 18, 19, 53, 72, length]
    steps = [decoder.schedule(prompt, start, end, 40) for start, end in pairwise(borders)]
    assert decoder.difference(expected, *steps) < TOLERANCE


@pytest.mark.parametrize("num_cached", [4, 8, 12, 20, 24, 36])
@torch.inference_mode()
def test_behind_a_cached_head_of_a_group(
    num_cached: int, decoder: Decoder, reference: transformers.PreTrainedModel
) -> None:
    """Another request left the first blocks there; this one's own lie elsewhere. A spoiled block does not go unseen."""
    prompt = PROMPTS["two that touch"]
    length = len(prompt.token_ids)
    _, expected = prompt.expected(reference)
    decoder.compute(decoder.schedule(prompt, 0, length, first_block=40))

    num_shared = num_cached // BLOCK_SIZE
    rest = decoder.schedule(prompt, num_cached, length, first_block=20, num_shared=num_shared)
    rest.block_tables = [[*(40 - i for i in range(num_shared)), *list(rest.block_tables[0])[num_shared:]]]
    assert decoder.difference(expected, rest) < TOLERANCE

    for tensor in decoder.pool.tensors:
        tensor[40 - num_shared + 1] *= -1
    assert decoder.difference(expected, rest) > TOLERANCE


@torch.inference_mode()
def test_among_strangers(decoder: Decoder, reference: transformers.PreTrainedModel) -> None:
    prompts = [
        make_prompt(30),
        make_prompt(5, "picture", "picture", 6),
        make_prompt(20, seed=1),
        make_prompt("picture", 4, seed=1),
        make_prompt(5, "picture", "picture", 6, seed=1),
    ]
    decoder.compute(decoder.schedule(prompts[0], 0, 29, first_block=63))
    batch = [
        decoder.schedule(prompt, start, len(prompt.token_ids), first_block=63 - 12 * i)
        for i, (prompt, start) in enumerate(zip(prompts, (29, 0, 0, 0, 0), strict=True))
    ]
    for item, prompt, actual in zip(batch, prompts, decoder.compute(*batch), strict=True):
        _, expected = prompt.expected(reference)
        torch.testing.assert_close(actual, expected[item.start :], atol=TOLERANCE, rtol=0)


@torch.inference_mode()
def test_it_is_the_groups_that_make_it_equal(decoder: Decoder, reference: transformers.PreTrainedModel) -> None:
    """Neither pictures that see only what precedes them do, nor touching ones of which each sees but itself."""
    prompt = PROMPTS["two that touch"]
    length = len(prompt.token_ids)
    _, expected = prompt.expected(reference)
    decoder.joins = False
    assert decoder.difference(expected, decoder.schedule(prompt, 0, length, 40)) > TOLERANCE
    decoder.joins = True
    apart = [decoder.schedule(prompt, start, end, 40) for start, end in ((0, 21), (21, length))]
    apart[0].features = list(apart[0].features)[:1]
    assert decoder.difference(expected, *apart) > TOLERANCE


@pytest.mark.parametrize(
    ("config", "joins"),
    [
        (tiny_gemma3_config(), True),
        (transformers.Gemma3Config(), True),
        (transformers.Gemma3TextConfig(), False),
        (transformers.LlavaConfig(), False),
        (transformers.Qwen2_5_VLConfig(), False),
        (transformers.Gemma4Config(), False),
    ],
    ids=lambda value: value.model_type if isinstance(value, transformers.PreTrainedConfig) else "",
)
def test_which_models_join_pictures(config: transformers.PreTrainedConfig, joins: bool) -> None:
    assert joins_touching(_model_class(config), config) == joins


@pytest.mark.parametrize(
    "config", [transformers.Molmo2Config(), transformers.Gemma4UnifiedConfig()], ids=lambda c: c.model_type
)
def test_other_masks_are_refused(config: transformers.PreTrainedConfig) -> None:
    """Molmo 2's pictures see all later ones; Gemma 4's see their group in some layers only."""
    with pytest.raises(UnsupportedModelError, match=f"{config.model_type}: its picture tokens see neither"):
        joins_touching(_model_class(config), config)


def test_asking_for_masks_changes_no_configuration() -> None:
    config = tiny_gemma3_config()
    before = config.to_dict()
    joins_touching(_model_class(config), config)
    assert config.to_dict() == before and config.get_text_config()._attn_implementation is None
