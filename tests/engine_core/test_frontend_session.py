"""What waits for a frontend that reads late: fewer messages, and each of them as good as those it was made of."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine_core.frontend_session import FrontendSession
from ipc.messages import EngineOutputs, Stats
from ipc.vocabulary import RequestError, RequestOutput

MAX_TOKENS = 64


def waiting(*messages: EngineOutputs, max_merged_tokens: int = MAX_TOKENS) -> list[EngineOutputs]:
    session = FrontendSession(b"f", 0.0, 1)
    for message in messages:
        session.keep(message, max_merged_tokens)
    assert all(isinstance(message, EngineOutputs) for message in session.backlog)
    return list(session.backlog)  # type: ignore[arg-type]


def output(index: int, *token_ids: int, request_id: str = "r", **fields: Any) -> RequestOutput:
    return RequestOutput(request_id, list(token_ids), index=index, **fields)


def test_outputs_of_several_steps_become_one_per_continuation() -> None:
    (message,) = waiting(*(EngineOutputs([output(0, step), output(1, 10 + step)]) for step in range(5)))
    assert [(o.index, o.new_token_ids) for o in message.outputs] == [
        (0, [0, 1, 2, 3, 4]),
        (1, [10, 11, 12, 13, 14]),
    ]


def test_a_request_ends_with_its_last_output_also_if_another_continuation_ended_before() -> None:
    (message,) = waiting(
        EngineOutputs([output(0, 1), output(1, 11)]),
        EngineOutputs([output(0, 2), output(1, 12, finish_reason="stop", num_unfinished=1)]),
        EngineOutputs([output(0, 3, finish_reason="length")]),
    )
    assert [o.ends_request for o in message.outputs] == [False] * (len(message.outputs) - 1) + [True]


def test_an_id_that_is_used_again_is_another_request() -> None:
    (message,) = waiting(
        EngineOutputs([output(0, 1, finish_reason="stop")]),
        EngineOutputs([output(0, 2)]),
        EngineOutputs([output(0, 3)]),
    )
    assert [(o.new_token_ids, o.finish_reason) for o in message.outputs] == [([1], "stop"), ([2, 3], None)]


def test_messages_keep_their_order_and_their_size() -> None:
    session = FrontendSession(b"f", 0.0, 1)
    answer = Stats(1, None, {})  # type: ignore[arg-type]
    session.keep(EngineOutputs([output(0, 1)]), MAX_TOKENS)
    session.keep(answer, MAX_TOKENS)
    for step in range(100):
        session.keep(EngineOutputs([output(0, step)]), MAX_TOKENS)
    first, second, *rest = session.backlog
    assert isinstance(first, EngineOutputs) and second is answer
    assert [len(o.new_token_ids) for m in rest for o in m.outputs] == [32, 32, 32, 4]  # type: ignore[union-attr]


def test_refusals_do_not_grow_into_one_message() -> None:
    refused = RequestError("invalid", "not here")
    ids = [str(n) * 50 for n in range(10)]
    messages = waiting(
        *(EngineOutputs([RequestOutput(own_id, [], finish_reason="error", error=refused)]) for own_id in ids)
    )
    assert [output.request_id for message in messages for output in message.outputs] == ids
    assert len(messages) == len(ids)


@pytest.mark.parametrize("seed", range(20))
def test_however_outputs_are_merged_each_continuation_is_whole_and_the_request_ends_once(seed: int) -> None:
    draw = random.Random(seed)
    lengths = {(request, index): draw.randint(1, 12) for request in "abc" for index in range(3)}
    done = dict.fromkeys(lengths, 0)
    steps = []
    while running := [key for key in lengths if done[key] < lengths[key]]:
        step = EngineOutputs()
        for request, index in running:
            done[request, index] += 1
            ended = done[request, index] == lengths[request, index]
            unfinished = sum(done[other] < lengths[other] for other in lengths if other[0] == request)
            step.outputs.append(
                output(
                    index,
                    done[request, index],
                    request_id=request,
                    finish_reason="length" if ended else None,
                    num_unfinished=unfinished if ended else 0,
                )
            )
        steps.append(step)
    got: dict[tuple[str, int], list[int]] = {key: [] for key in lengths}
    over: set[str] = set()
    for message in waiting(*steps, max_merged_tokens=draw.choice([1, 8, 1000])):
        for part in message.outputs:
            assert part.request_id not in over
            got[part.request_id, part.index] += part.new_token_ids
            over |= {part.request_id} if part.ends_request else set()
    assert got == {key: list(range(1, length + 1)) for key, length in lengths.items()}
    assert over == set("abc")
