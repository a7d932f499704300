"""Log-probabilities of whole prompts are the largest thing an engine says: each must fit a message."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import zmq

from engine_core import EngineConfig, EngineCore, InvalidRequestError
from engine_core.checks import MAX_PROMPT_LOGPROB_VALUES
from engine_core.runner import ScheduledRequest, StepResult
from ipc.codec import encode
from ipc.messages import AddRequest, EngineOutputs
from ipc.vocabulary import EngineRequest, RequestOutput, SamplingParams, TokenLogprob
from tests.fake_runner import FakeRunner
from tests.wire_peers import BareFrontend, is_idle, private_endpoint, running_server, wait_until

# Values that take the most room: MessagePack needs 5 bytes for these integers, 9 for a float.
LARGE = TokenLogprob(2**31, -1.0, 2**31, [(2**31, -1.0)] * 20)
MAX_PROMPT_TOKENS = MAX_PROMPT_LOGPROB_VALUES // 22
# More than one message holds.
NUM_PROMPTS = 5


class LargeRunner(FakeRunner):
    """Computes nothing before it `may_run`."""

    def __init__(self) -> None:
        super().__init__(num_blocks=20_000)
        self.may_run = threading.Event()

    def execute(self, batch: Sequence[ScheduledRequest]) -> StepResult:
        assert self.may_run.wait(20)
        result = super().execute(batch)
        for place, logprobs in result.prompt_logprobs.items():
            result.prompt_logprobs[place] = [LARGE] * len(logprobs)
        return result


@pytest.fixture
def runner() -> LargeRunner:
    return LargeRunner()


@pytest.fixture
def engine(runner: LargeRunner) -> EngineCore:
    return EngineCore(EngineConfig(max_num_batched_tokens=NUM_PROMPTS * MAX_PROMPT_TOKENS), runner)


def request(request_id: str, num_tokens: int, num_top_tokens: int) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=num_top_tokens)
    return EngineRequest(request_id, [7] * num_tokens, params)


@pytest.mark.parametrize("num_top_tokens", [0, 1, 20])
def test_the_most_that_is_allowed_fits_a_message(engine: EngineCore, num_top_tokens: int) -> None:
    num_tokens = MAX_PROMPT_LOGPROB_VALUES // (num_top_tokens + 2)
    logprob = TokenLogprob(LARGE.token_id, LARGE.logprob, LARGE.rank, LARGE.top[:num_top_tokens])
    encode(EngineOutputs([RequestOutput("r" * 256, [1], prompt_logprobs=[logprob] * num_tokens)]), 1, 1)
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_PROMPT_LOGPROB_VALUES}") as refusal:
        engine.add_request(request("r", num_tokens + 1, num_top_tokens))
    assert refusal.value.param == "prompt_logprobs"


def test_those_of_several_requests_in_one_step_go_out_one_by_one(
    engine: EngineCore, runner: LargeRunner, tmp_path: Path
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with running_server(private_endpoint(tmp_path), engine=engine) as server:
        frontend = BareFrontend(context, private_endpoint(tmp_path))
        frontend.hello()
        frontend.add("first", [1], 1)
        wait_until(engine.has_unfinished_requests)
        for n in range(NUM_PROMPTS):
            frontend.send(AddRequest(request(f"r{n}", MAX_PROMPT_TOKENS, 20)))
        wait_until(lambda: server._commands.qsize() == NUM_PROMPTS)
        runner.may_run.set()
        first, *outputs = [next(frontend.outputs()) for _ in range(NUM_PROMPTS + 1)]
        assert first.request_id == "first"
        assert engine.stats().steps == 2
        assert [len(output.prompt_logprobs or []) for output in outputs] == [MAX_PROMPT_TOKENS] * NUM_PROMPTS
        wait_until(lambda: is_idle(server.engine))
    context.destroy(linger=0)
