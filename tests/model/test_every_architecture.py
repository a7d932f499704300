"""Every causal LM transformers knows is served right, or not at all.

What decides is nothing but log-probabilities, so an architecture that comes with the next transformers is tried on
the day it is installed. Two prompts and one that shares the first's prefix run in chunks, cold and then cached.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine_core.model.loader import _model_class
from engine_core.model.support import UnsupportedModelError, check_config, check_model_class

from .any_architecture import CannotBeMadeError, load_reference, save_random_model, tiny_configs
from .equality import make_engine, run_prompts

pytestmark = pytest.mark.slow

CONFIG_CLASSES = {config_class.model_type: config_class for config_class in transformers.MODEL_FOR_CAUSAL_LM_MAPPING}
# A refusal of one of these is a mistake.
MUST_BE_SERVED = frozenset(
    """
    cohere cohere2 deepseek_v2 deepseek_v3 ernie4_5 exaone4 gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_neox
    gpt_oss granite granitemoe hunyuan_v1_dense llama ministral mistral mixtral olmo olmo2 olmo3 opt phi phi3 qwen2
    qwen2_moe qwen3 qwen3_moe seed_oss smollm3 starcoder2
    """.split()
)
# Too large with any size we know how to set (most are made of several configurations), or in need of more than sizes.
CANNOT_BE_MADE = frozenset(
    """
    cohere_compass_text dbrx emu3 fuyu gemma3 gemma3n gemma4 gemma4_assistant gemma4_unified gemma4_unified_assistant
    got_ocr2 moss_transcribe_diarize phi4_multimodal xmod
    """.split()
)
LOGPROB_TOLERANCE = 1e-3


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    first, second = torch.randint(3, 250, (2, 77), generator=generator).tolist()
    return [first, second, first[:48] + second[:20]]


@pytest.mark.parametrize("model_type", sorted(CONFIG_CLASSES))
def test_served_right_or_not_at_all(model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With a sliding window and without, where the architecture has the choice. Passes break none of them."""
    served, refusals, errors = 0, [], []
    for windowed in (False, True):
        for config in tiny_configs(CONFIG_CLASSES[model_type], windowed=windowed):
            try:
                check_config(config)
                model_class = _model_class(config)
                check_model_class(model_class)
                expected = reference_logprobs(model_class, config, tmp_path)
            except UnsupportedModelError as reason:
                refusals.append(str(reason))
                break
            except Exception as error:  # every architecture has its own way of refusing sizes
                errors.append(f"{type(error).__name__}: {error}")
                continue
            try:
                check_logprobs(tmp_path, expected)
                served += 1
            except UnsupportedModelError as reason:
                refusals.append(str(reason))
            break
    assert served or model_type not in MUST_BE_SERVED, refusals + errors
    assert "passes_skipped" not in caplog.text
    if model_type in CANNOT_BE_MADE:
        pytest.skip(errors[0] if errors else "its configuration has no defaults")
    assert served or refusals, errors


def reference_logprobs(model_class: Any, config: Any, directory: Path) -> list[torch.Tensor]:
    shutil.rmtree(directory, ignore_errors=True)
    save_random_model(model_class, config, directory)
    model = load_reference(model_class, directory)
    with torch.inference_mode():
        logits = [model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1] for prompt in make_prompts()]
    logprobs = [row.float().log_softmax(dim=-1) for row in logits]
    if not all(row.isfinite().all() for row in logprobs):
        raise CannotBeMadeError("its log-probabilities are not finite")
    return logprobs


def check_logprobs(directory: Path, expected: list[torch.Tensor]) -> None:
    engine = make_engine(directory, num_blocks=64, max_num_batched_tokens=50, max_num_seqs=8)
    for _ in range(2):
        for run, reference in zip(run_prompts(engine, make_prompts(), num_tokens=1), expected, strict=True):
            difference = (run.logprobs[0] - reference).abs().max().item()
            assert difference <= LOGPROB_TOLERANCE
