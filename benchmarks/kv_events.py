"""What KV events cost: an engine's bookkeeping with and without them, and what the thread that publishes can do.

    python -m benchmarks.kv_events [--rounds 15] [--blocks 100000]

No model and no sockets. Engines with and without events are measured in turns, in CPU time of one thread with the
garbage collector off; figures are medians over the rounds. `take` is what the engine loop does after a step.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

from engine_core.kv_cache import BlockHasher, KVCacheManager
from engine_core.kv_events.describe import EventDescriber
from engine_core.kv_events.recorder import CacheChange, KVEventRecorder
from engine_core.request import Request
from engine_core.runner import StepResult
from engine_core.scheduler import Scheduler
from ipc.kv_events import BatchEncoder, KVEventTable, decode_batch
from ipc.vocabulary import EngineRequest, SamplingParams

BLOCK_SIZE = 16
PROMPT_BLOCKS = 512
NUM_RUNNING = 256
MANY_TOKENS = 1 << 20


def make_request(hasher: BlockHasher, name: str, token_ids: list[int], max_tokens: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    request = Request(EngineRequest(name, token_ids, params), max_tokens=max_tokens, seed=0, arrival_time_s=0.0)
    hasher.extend(request)
    return request


class Side:
    """An engine's bookkeeping, with a recorder or without. Times are in seconds."""

    def __init__(self, with_events: bool, num_rounds: int) -> None:
        self.hasher = BlockHasher("sha256", BLOCK_SIZE)
        self.recorders: list[KVEventRecorder] = []
        self._with_events = with_events
        self._prompts = self._manager(4 * PROMPT_BLOCKS)
        # Each round every one of them fills a block.
        self._decodes = self._manager(NUM_RUNNING * (4 + num_rounds + 2))
        self._scheduler = Scheduler(
            self._decodes,
            max_num_seqs=NUM_RUNNING,
            max_num_batched_tokens=NUM_RUNNING * BLOCK_SIZE,
            max_model_len=MANY_TOKENS,
            hash_blocks=self.hasher.extend,
        )
        for index in range(NUM_RUNNING):
            token_ids = [index] * (BLOCK_SIZE + index % BLOCK_SIZE)
            self._scheduler.add(make_request(self.hasher, f"r{index}", token_ids, MANY_TOKENS))
        while not all(request.num_output_tokens for request in self._scheduler.requests.values()):
            self._step()

    def _manager(self, num_blocks: int) -> KVCacheManager:
        if not self._with_events:
            return KVCacheManager(num_blocks, BLOCK_SIZE)
        self.recorders.append(KVEventRecorder(1, num_blocks))
        return KVCacheManager(num_blocks, BLOCK_SIZE, tree=self.recorders[-1])

    def _step(self) -> None:
        step = self._scheduler.schedule()
        self._scheduler.update(step, StepResult([7 if entry.samples else None for entry in step.scheduled]))
        self.take()

    def take(self) -> list[CacheChange]:
        return [change for recorder in self.recorders for change in recorder.take()]

    def prompt(self, number: int) -> dict[str, float]:
        """A prompt that evicts as many blocks as it fills."""
        token_ids = list(range(number * 10_000, number * 10_000 + PROMPT_BLOCKS * BLOCK_SIZE))
        request = make_request(self.hasher, f"p{number}", token_ids, 16)

        def compute() -> None:
            hit = self._prompts.get_computed_blocks(request)
            self._prompts.allocate_slots(request, request.num_tokens - hit.num_tokens, hit)
            self._prompts.commit_step()
            self.take()
            self._prompts.free(request)

        return {"prompt of 512 blocks, evicting as many": seconds(compute)}

    def decode(self, number: int) -> dict[str, float]:
        """Steps in which each of the running requests fills one block."""

        def steps() -> None:
            for _ in range(BLOCK_SIZE):
                self._step()

        return {"step, 256 decodes (16 blocks filled)": seconds(steps) / BLOCK_SIZE}


def seconds(work: Callable[[], object]) -> float:
    started_s = time.thread_time()
    work()
    return time.thread_time() - started_s


def measure_engine(num_rounds: int) -> None:
    sides = {with_events: Side(with_events, num_rounds) for with_events in (False, True)}
    times_s: dict[str, dict[bool, list[float]]] = defaultdict(lambda: {False: [], True: []})
    for number in range(num_rounds + 1):
        for with_events, side in sides.items():
            for title, time_s in (side.prompt(number) | side.decode(number)).items():
                if number > 0:
                    times_s[title][with_events].append(time_s)
    print(f"{'median, µs':<42}{'without':>10}{'with':>10}{'ratio':>8}")
    for title, sided in times_s.items():
        without, with_ = (1e6 * statistics.median(sided[with_events]) for with_events in (False, True))
        print(f"{title:<42}{without:>10.1f}{with_:>10.1f}{with_ / without:>8.3f}")


def measure_publishing(num_blocks: int, num_rounds: int) -> None:
    """A tree of so many blocks, in prompts of 512: its snapshot, as events, as bytes, and read again."""
    hasher, recorder = BlockHasher("sha256", BLOCK_SIZE), KVEventRecorder(1, num_blocks)
    manager = KVCacheManager(num_blocks, BLOCK_SIZE, tree=recorder)
    for number in range(num_blocks // PROMPT_BLOCKS):
        token_ids = [number, *range(PROMPT_BLOCKS * BLOCK_SIZE - 1)]
        request = make_request(hasher, f"p{number}", token_ids, 16)
        manager.allocate_slots(request, request.num_tokens)
        manager.commit_step()
        manager.free(request)
    describer, encoder = EventDescriber(BLOCK_SIZE, (None,)), BatchEncoder()

    def described() -> list[bytes]:
        [(what, group, nodes)] = recorder.snapshot()
        parts = (CacheChange(what, group, nodes[start : start + 1024]) for start in range(0, len(nodes), 1024))
        return [encoder.encode(0.0, describer.events([part])) for part in parts]

    payloads = described()

    def read() -> None:
        table = KVEventTable()
        for payload in payloads:
            table.apply(decode_batch(payload).events)

    num_bytes = sum(map(len, payloads))
    print(f"\n{recorder.num_held} blocks, {num_bytes / 1e6:.1f} MB of events")
    for title, work in {
        "listed, by the engine loop": recorder.snapshot,
        "listed and encoded": described,
        "read into a table, by a consumer": read,
    }.items():
        median_s = statistics.median(seconds(work) for _ in range(num_rounds))
        print(f"{title:<42}{1e3 * median_s:>10.1f} ms{num_blocks / median_s / 1e6:>10.2f} million blocks/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=100_000)
    arguments = parser.parse_args()
    gc.disable()
    measure_engine(arguments.rounds)
    measure_publishing(arguments.blocks, arguments.rounds)


if __name__ == "__main__":
    main()
