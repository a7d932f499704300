"""The heaviest step a runner can be asked for, to be computed before anybody asks: what it takes must stay free."""

from __future__ import annotations

from engine_core.config import EngineConfig
from engine_core.request import Request
from engine_core.runner import ScheduledRequest
from ipc.vocabulary import EngineRequest, SamplingParams

# All of a rehearsal's requests share it, whatever they write.
SCRATCH_BLOCK_ID = 0


def heaviest_step(config: EngineConfig, max_model_len: int, num_groups: int) -> list[ScheduledRequest]:
    """As many requests as a step may have, all at the end of the longest context and all sampling with every rule that
    takes memory; one of them computes what the others leave of the token budget. Every block of every KV cache group
    is `SCRATCH_BLOCK_ID`. Where there may be adapters, all have some, as many different ones as there may be.
    """
    params = SamplingParams(
        temperature=1.0, top_p=0.9, min_p=0.01, presence_penalty=0.1, repetition_penalty=1.1, logprobs=20
    )
    source = EngineRequest("rehearsal", [0] * max_model_len, params)
    request = Request(source, max_tokens=1, seed=0, arrival_time_s=0.0)
    num_decodes = min(config.max_num_seqs, config.max_num_batched_tokens) - 1
    chunk_tokens = min(config.max_num_batched_tokens - num_decodes, max_model_len)
    block_tables = [[SCRATCH_BLOCK_ID] * -(-max_model_len // config.block_size)] * num_groups
    return [
        ScheduledRequest(
            request,
            max_model_len - num_tokens,
            num_tokens,
            block_tables,
            num_shared_blocks=0,
            adapter_slot=index % config.max_loras if config.enable_lora else None,
        )
        for index, num_tokens in enumerate((chunk_tokens, *[1] * num_decodes))
    ]
