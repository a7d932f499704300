"""Scheduling a step while the one before it still runs, and nobody knows yet which tokens come out of that.

A device with a queue of its own computes step n while the host has nothing to do, and then waits while the host looks
at the tokens, schedules step n + 1 and lays it out. Most steps only continue: every request of step n gets one more
token. Such a step can be scheduled and launched behind step n, whose tokens go from step to step on the device; the
host learns them one step later. A request whose token turns out to be its last has one token too many computed, which
is thrown away with its blocks; that its length is reached is known before.

Whatever else is to be done (somebody is admitted, a prompt goes on in chunks, somebody must give way, rules look at
the last token) waits for the tokens, as if this file were not there. So a step scheduled ahead never preempts, admits,
copies or places an adapter, and in the order of the device a block that step n frees is never written by anybody new
before step n + 1, which may still write it, has run; nor is an adapter's slot.
"""

from __future__ import annotations

from .request import Request
from .runner import ScheduledRequest
from .scheduler import Scheduler
from .step import Step
from .token_outputs import ends_with_next_token


def schedule_ahead(scheduler: Scheduler, step: Step) -> Step | None:
    """The step after `step`, which is running, with one token for everybody who goes on; its slots are allocated.

    None where this has to wait for the tokens of `step`. Then what was allocated stays with its requests.
    """
    # What is kept no longer may be what somebody waits for.
    scheduler.kv.release_expired()
    if scheduler.has_more_to_do():
        return None
    places = {entry.request: place for place, entry in enumerate(step.scheduled) if entry.samples}
    if not all(request in places and _can_go_on_unseen(request) for request in scheduler.running):
        return None
    ahead = Step()
    for request in scheduler.running:
        if ends_with_next_token(request, scheduler.max_model_len):
            continue
        place = places[request]
        if scheduler.kv.allocate_slots(request, step.scheduled[place].num_tokens + 1) is None:
            return None
        table = scheduler.kv.tables[request.request_id]
        ahead.scheduled.append(
            ScheduledRequest(
                request,
                request.num_tokens,
                1,
                table.block_tables,
                table.num_shared_blocks,
                follows=place,
                adapter_slot=step.scheduled[place].adapter_slot,
            )
        )
    return ahead if ahead.scheduled else None


def _can_go_on_unseen(request: Request) -> bool:
    """Whether the token after the next one can be computed, sampled and handed out without a look at the next one."""
    params = request.sampling_params
    forks_next = params.n > 1 and request.index == 0 and request.num_output_tokens == 0
    return not (forks_next or request.prompt_logprobs is not None or params.looks_at_last_token)
