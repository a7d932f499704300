"""The adapter that comes with Foreword, in an engine: one batch, two ways of talking."""

from __future__ import annotations

from typing import Any

import transformers

from engine_core import DEFAULT_MODEL, EngineConfig, EngineCore, EngineRequest, SamplingParams, resolve_adapter
from engine_core.model.resolve import resolve_model
from tools.demo_vlm.pirate import pirate

ANSWERS = {
    "Hello": "Hello! Show me a picture of simple shapes.",
    "What are you?": "I am Foreword's small demo model. I look at simple shapes.",
    "What is the capital of France?": "I can only talk about simple shapes in pictures.",
}


def test_one_batch_answers_in_both_ways() -> None:
    directory = resolve_model(DEFAULT_MODEL).path
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    engine = EngineCore(EngineConfig(model=str(directory), device="cpu", num_blocks=64, enable_lora=True))
    assert engine.load_adapter("pirate", resolve_adapter("shapes-pirate")).base_model == DEFAULT_MODEL
    said: dict[str, list[int]] = {}
    for adapter in ("", "pirate"):
        for question in ANSWERS:
            chat = [{"role": "user", "content": question}]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            params = SamplingParams(temperature=0.0, max_tokens=40)
            request = EngineRequest(f"{adapter}: {question}", prompt, params, adapter=adapter)
            engine.add_request(request)
            said[request.request_id] = []
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            said[output.request_id] += output.new_token_ids
    texts = {name: tokenizer.decode(token_ids, skip_special_tokens=True) for name, token_ids in said.items()}
    assert texts == {f": {question}": answer for question, answer in ANSWERS.items()} | {
        f"pirate: {question}": pirate(answer) for question, answer in ANSWERS.items()
    }
