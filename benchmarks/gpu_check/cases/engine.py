"""The last step: a tiny random model through the whole engine, beside transformers' own `generate`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.gpu_check.case import Case, Setting, Work
from kernels.dispatch import computed_by

_VOCAB_SIZE = 512
# Below this gap between its two highest logits the reference's own choice is a matter of rounding.
_UNDECIDED_GAP = 1e-3


def engine_cases(setting: Setting) -> Iterator[Case]:
    try:
        import msgspec  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        print(f"the engine is left out: {error}", file=sys.stderr)
        return
    for name, is_plain in (("step by step", True), ("graphs, scheduled ahead", False)):
        yield Case(f"greedy as generate(), cold and cached: {name}", partial(_work, setting, is_plain))


def _work(setting: Setting, is_plain: bool) -> Work:
    return Work(lambda: _check(setting, is_plain))


def _check(setting: Setting, is_plain: bool) -> float:
    """0, or infinite where a token differs that the reference was sure of."""
    lengths, num_outputs = ((5, 20), 8) if setting.is_rehearsal else ((5, 70, 300, 301, 900), 48)
    longest = torch.randint(3, _VOCAB_SIZE, (max(lengths),)).tolist()
    # They begin alike, so each finds blocks of those before it.
    prompts = [longest[:length] for length in lengths]
    with TemporaryDirectory() as directory:
        model = _save_tiny_model(Path(directory)).to(setting.device)
        expected = [_generate(model, prompt, num_outputs) for prompt in prompts]
        # In the interpreter a whole model takes too long.
        with computed_by("torch") if setting.is_rehearsal else nullcontext():
            cold, cached = _run_engine(Path(directory), setting, is_plain, prompts, num_outputs)
    num_compared = sum(map(len, expected))
    if num_compared < len(prompts) * num_outputs // 2:
        raise RuntimeError(f"the reference was sure of {num_compared} tokens only")
    for outputs in (cold, cached):
        if any(output[: len(sure)] != sure for output, sure in zip(outputs, expected, strict=True)):
            return math.inf
    return 0.0


def _save_tiny_model(directory: Path) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    with torch.inference_mode(False):
        model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(directory)
    # Else what its file says of special tokens would leak into the reference.
    model.generation_config = transformers.GenerationConfig()
    return model


def _generate(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Up to the first one that the reference was not sure of."""
    import transformers

    input_ids = torch.tensor([prompt], device=model.device)
    generated = model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        generation_config=transformers.GenerationConfig(
            do_sample=False,
            num_beams=1,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        ),
    )
    highest = torch.cat(generated.logits).float().topk(2).values
    gaps = (highest[:, 0] - highest[:, 1]).tolist()
    num_sure = next((place for place, gap in enumerate(gaps) if gap < _UNDECIDED_GAP), num_tokens)
    return generated.sequences[0, len(prompt) :][:num_sure].tolist()


def _run_engine(
    directory: Path, setting: Setting, is_plain: bool, prompts: list[list[int]], num_tokens: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Outputs of all prompts together, and again when they are cached."""
    from engine_core import EngineConfig, EngineCore, EngineRequest, SamplingParams

    engine = EngineCore(
        EngineConfig(
            model=str(directory),
            dtype="float32",
            device=setting.device.type,
            num_blocks=512,
            max_model_len=1024,
            # Chunks, and prefill beside decode.
            max_num_batched_tokens=256,
            enforce_eager=is_plain,
            async_scheduling=False if is_plain else None,
        )
    )
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    rounds = []
    for name in ("cold", "cached"):
        outputs: dict[str, list[int]] = {f"{name}-{i}": [] for i in range(len(prompts))}
        num_cached = 0
        for request_id, prompt in zip(outputs, prompts, strict=True):
            engine.add_request(EngineRequest(request_id, prompt, params))
        while engine.has_unfinished_requests():
            for output in engine.step().outputs:
                if output.error is not None:
                    raise RuntimeError(f"request {output.request_id} failed: {output.error.message}")
                outputs[output.request_id] += output.new_token_ids
                num_cached = max(num_cached, output.num_cached_tokens)
        if name == "cached" and not num_cached:
            raise RuntimeError("nothing was found in the prefix cache")
        rounds.append(list(outputs.values()))
    return rounds[0], rounds[1]
