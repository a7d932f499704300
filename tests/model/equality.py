"""What "right" means for a model behind the engine, as code.

The reference is transformers' own greedy `generate` on one unpadded sequence in float32. The engine's greedy tokens
must be the same, up to the first place where the reference itself can hardly decide; its log-probabilities agree
everywhere until there. `docs/design.md` has the rules; the numbers are below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import transformers

import engine_core.model.runner as runner_module
from engine_core import EngineConfig, EngineCore, EngineRequest, SamplingParams
from engine_core.kv_cache import KVCacheBlock, PrefixHit
from engine_core.model.device_queue import DeviceQueue
from engine_core.model.staging import Staging
from engine_core.runner import ScheduledRequest
from kernels.quantize_kv import LARGEST

NUM_OUTPUT_TOKENS = 32
# Below this gap between its two highest logits the reference's own choice is a matter of rounding.
UNDECIDED_GAP = 1e-3
CHOSEN_PROMPT_GAP = 5e-3
LOGPROB_TOLERANCE = 1e-3
MAX_SHARE_ENDED_EARLY = 0.02
MIN_COMPARED_TOKENS = 8
MIN_DISTINCT_TOKENS = 8


class NotEqualError(AssertionError):
    """The engine's output is not the reference's."""


@dataclass(frozen=True)
class Reference:
    """At `output_token_ids[i]`, `gaps[i]` is the top-2 logit gap and `logprobs[i]` `[vocab_size]` the whole choice."""

    prompt_token_ids: list[int]
    output_token_ids: list[int]
    gaps: list[float]
    logprobs: torch.Tensor

    @property
    def num_comparable(self) -> int:
        """How many tokens can be compared: to the first undecided place."""
        return next((i for i, gap in enumerate(self.gaps) if gap < UNDECIDED_GAP), len(self.gaps))


@dataclass(frozen=True)
class EngineRun:
    """What the engine made of one prompt. `logprobs` has an entry for every sampled place, by its number."""

    token_ids: list[int]
    logprobs: dict[int, torch.Tensor]
    num_cached_tokens: int


def first_tokens(reference: Reference, num_tokens: int) -> Reference:
    """The same prompt, with less output."""
    return replace(
        reference,
        output_token_ids=reference.output_token_ids[:num_tokens],
        gaps=reference.gaps[:num_tokens],
        logprobs=reference.logprobs[:num_tokens],
    )


def num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are equal."""
    different = (place for place, (left, right) in enumerate(zip(one, other)) if left != right)
    return next(different, min(len(one), len(other)))


def load_reference_model(directory: Path) -> transformers.PreTrainedModel:
    """In float32, with `sdpa` where the architecture has it (Gemma 2 has only `eager`)."""
    torch.set_float32_matmul_precision("highest")
    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    auto_class = transformers.AutoModelForCausalLM
    if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        auto_class = transformers.AutoModelForImageTextToText
    model = auto_class.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager" if config.model_type == "gemma2" else "sdpa",
        local_files_only=True,
    )
    # What a model's own file says about sampling or stopping must not leak into the reference.
    model.generation_config = transformers.GenerationConfig()
    return model.eval()


def generate_reference(
    model: transformers.PreTrainedModel, prompt_token_ids: list[int], num_tokens: int = NUM_OUTPUT_TOKENS
) -> Reference:
    input_ids = torch.tensor([prompt_token_ids])
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    return generate_reference_from(model, inputs, num_tokens)


@torch.inference_mode()
def generate_reference_from(
    model: transformers.PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    num_tokens: int = NUM_OUTPUT_TOKENS,
    *,
    end_token_id: int | None = None,
) -> Reference:
    """`inputs` are what a processor makes of a prompt, pictures included.

    The output has `num_tokens`; or, with an `end_token_id`, it ends with that, if it comes earlier.
    """
    prompt_token_ids = inputs["input_ids"][0].tolist()
    generated = model.generate(
        **inputs,
        generation_config=transformers.GenerationConfig(
            do_sample=False,
            num_beams=1,
            min_new_tokens=num_tokens if end_token_id is None else None,
            max_new_tokens=num_tokens,
            eos_token_id=end_token_id,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        ),
    )
    logits = torch.cat(generated.logits).float()
    top = logits.topk(2).values
    return Reference(
        prompt_token_ids=prompt_token_ids,
        output_token_ids=generated.sequences[0, len(prompt_token_ids) :].tolist(),
        gaps=(top[:, 0] - top[:, 1]).tolist(),
        logprobs=logits.log_softmax(dim=-1),
    )


def make_engine(directory: Path, queue: DeviceQueue | None = None, **settings: object) -> EngineCore:
    """On the CPU, or on a device that `queue` stands for."""
    defaults = {"model": str(directory), "dtype": "float32", "device": "cpu", "num_blocks": 256}
    config = EngineConfig(**(defaults | settings))
    return EngineCore(config, runner_module.ModelRunner(config, queue))


def run_prompts(
    engine: EngineCore, prompts: Sequence[list[int]], num_tokens: int = NUM_OUTPUT_TOKENS
) -> list[EngineRun]:
    """Greedy outputs of all prompts, handed to the engine at once."""
    params = greedy(num_tokens)
    return run_requests(engine, [(EngineRequest(str(i), prompt, params), {}) for i, prompt in enumerate(prompts)])


def greedy(num_tokens: int = NUM_OUTPUT_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def run_requests(
    engine: EngineCore, requests: Sequence[tuple[EngineRequest, dict[bytes, dict[str, np.ndarray]]]]
) -> list[EngineRun]:
    """Outputs of all requests, handed to the engine at once, each with the inputs of its features."""
    runs = {request.request_id: EngineRun([], {}, 0) for request, _ in requests}
    num_cached = dict.fromkeys(runs, 0)
    with _recorded_logprobs(runs):
        for request, inputs in requests:
            engine.add_request(request, inputs)
        while engine.has_unfinished_requests():
            for output in engine.step().outputs:
                if output.error is not None:
                    raise NotEqualError(f"request {output.request_id} failed: {output.error.message}")
                runs[output.request_id].token_ids.extend(output.new_token_ids)
                num_cached[output.request_id] = output.num_cached_tokens
    return [EngineRun(run.token_ids, run.logprobs, num_cached[request_id]) for request_id, run in runs.items()]


@contextmanager
def _recorded_logprobs(runs: dict[str, EngineRun]) -> Iterator[None]:
    """Look over the sampler's shoulder: the engine does not give out logits."""
    original = runner_module.sample

    def sample(logits: torch.Tensor, batch: Sequence[ScheduledRequest], staging: Staging) -> torch.Tensor:
        logprobs = logits.float().log_softmax(dim=-1).cpu()
        for row, item in zip(logprobs, batch, strict=True):
            runs[item.request.request_id].logprobs[item.num_output_tokens] = row
        return original(logits, batch, staging)

    with patch.object(runner_module, "sample", sample):
        yield


def check_equal(references: Sequence[Reference], runs: Sequence[EngineRun]) -> None:
    """Compare all prompts of a test.

    Raises:
        NotEqualError: a token or a log-probability differs, or too many comparisons ended early.
    """
    num_ended_early = 0
    for index, (reference, run) in enumerate(zip(references, runs, strict=True)):
        comparable = reference.num_comparable
        expected, actual = reference.output_token_ids[:comparable], run.token_ids[:comparable]
        if actual != expected:
            place = next((i for i, (a, b) in enumerate(zip(actual, expected)) if a != b), len(actual))
            raise NotEqualError(f"prompt {index}: token {place} of {expected} is another one in {actual}")
        # The token at the undecided place itself may differ, but what it was chosen from may not.
        for place in range(min(comparable + 1, len(reference.gaps))):
            difference = (run.logprobs[place] - reference.logprobs[place]).abs().max().item()
            # Written so that NaN is a difference.
            if not difference <= LOGPROB_TOLERANCE:
                raise NotEqualError(f"prompt {index}: log-probabilities of token {place} differ by {difference}")
        if comparable < len(reference.gaps):
            num_ended_early += 1
            if comparable < MIN_COMPARED_TOKENS:
                raise NotEqualError(f"prompt {index}: the reference is undecided at its token {comparable} already")
    if num_ended_early > MAX_SHARE_ENDED_EARLY * len(references):
        raise NotEqualError(f"{num_ended_early} of {len(references)} comparisons ended early")


def corrupt_last_cached_block(engine: EngineCore, request: EngineRequest) -> None:
    """Spoil the K/V of the deepest full block that `request` would share, as a wrong hit or a stray write would."""
    whole_blocks = [[block for block in blocks if block is not None] for blocks in _hit(engine, request).blocks]
    assert any(whole_blocks), "no block of this prompt is cached: there is nothing to corrupt"
    _corrupt(engine, [blocks[-1] for blocks in whole_blocks if blocks])


def corrupt_copied_slots(engine: EngineCore, request: EngineRequest) -> None:
    """Spoil the K/V of the blocks whose first slots would be copied for `request`."""
    tail = _hit(engine, request).tail
    assert tail is not None, "nothing would be copied for this prompt: there is nothing to corrupt"
    _corrupt(engine, tail.blocks)


def _hit(engine: EngineCore, request: EngineRequest) -> PrefixHit:
    return engine._scheduler.kv.get_computed_blocks(engine.prepare_request(request))


def _corrupt(engine: EngineCore, blocks: Sequence[KVCacheBlock]) -> None:
    runner = engine.runner
    assert isinstance(runner, runner_module.ModelRunner)
    for tensor in runner.pool.tensors:
        # Of codes the scales: with both turned around nothing would have changed.
        if tensor.dtype not in LARGEST:
            for block in blocks:
                tensor[block.block_id] *= -1


def poison_unowned_slots(engine: EngineCore) -> None:
    """Fill every block that nothing is cached in with NaN: whoever reads what is not theirs gives itself away."""
    runner = engine.runner
    assert isinstance(runner, runner_module.ModelRunner)
    for block in engine._scheduler.kv.pool.blocks:
        if block.node is None and block.ref_cnt == 0:
            for tensor in runner.pool.tensors:
                # Codes stay what they are: their scales are NaN.
                if tensor.dtype not in LARGEST:
                    tensor[block.block_id] = float("nan")
