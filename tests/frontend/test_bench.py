"""`foreword bench`: what it sends, what it makes of the answers, and what of servers that do not answer."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from frontend.bench.report import print_report
from frontend.bench.results import Parts, Result
from frontend.bench.run import PARTS, prepare, run_parts
from frontend.bench.statistics import median, percentile, ratio, spread, total
from frontend.bench.texts import TextMaker, read_tokenizer
from frontend.bench.workloads import Scale
from frontend.cli import USER_ERROR_EXIT_CODE
from frontend.openai_client import OpenAIClient, ServerError, UnreachableError
from frontend.prompt.tokenizer import ModelTokenizer
from ipc.vocabulary import EngineRequest, RequestOutput
from tests.frontend.canned_server import MODELS, answering, canned_server, chunk, events, whole
from tests.frontend.live_app import live_app
from tests.frontend.scripted_engine import ScriptedEngine

COMMAND = [sys.executable, "-c", "from frontend.cli import main; main()", "bench"]
LIVENESS_S = 60.0
MAX_MODEL_LEN = 4096
BLOCK_SIZE = 16
SMALL = Scale(
    prefix_sizes=(100, 300),
    decode_contexts=(60,),
    decode_tokens=8,
    num_streams=3,
    streams_context=60,
    repeats=2,
    num_chats=2,
    num_turns=3,
    first_message_tokens=40,
    answer_tokens=4,
    num_requests=5,
    concurrency=2,
    shared_tokens=200,
    shared_answer_tokens=3,
    unique_tokens=60,
    unique_answer_tokens=3,
    num_tiny=4,
)


class CachingEngine(ScriptedEngine):
    """Finds prefixes of whole blocks as a prefix cache would, and generates one token for ever."""

    def __init__(self, token_id: int, *, max_model_len: int = MAX_MODEL_LEN) -> None:
        super().__init__(self._answer)
        self.capabilities = msgspec.structs.replace(self.capabilities, max_model_len=max_model_len)
        self.max_num_in_flight = 0
        self._token_id = token_id
        self._seen: set[tuple[int, ...]] = set()

    async def _answer(self, request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        self.max_num_in_flight = max(self.max_num_in_flight, self.num_in_flight)
        prompt = tuple(request.prompt_token_ids)
        prefixes = [prompt[:end] for end in range(BLOCK_SIZE, len(prompt), BLOCK_SIZE)]
        num_cached = max((len(prefix) for prefix in prefixes if prefix in self._seen), default=0)
        self._seen.update(prefixes)
        num_tokens = request.sampling_params.max_tokens
        for i in range(num_tokens):
            await asyncio.sleep(0.001)
            last = i == num_tokens - 1
            yield RequestOutput(request.request_id, [self._token_id], num_cached, "length" if last else None)


class Watched:
    """A `Watcher` that remembers."""

    def __init__(self) -> None:
        self.expected: dict[str, int] = {}
        self.ended: Counter[str] = Counter()
        self._part = ""

    def part_begins(self, name: str, num_requests: int) -> None:
        self._part = name
        self.expected[name] = num_requests

    def request_ended(self) -> None:
        self.ended[self._part] += 1

    def part_ended(self, name: str, elapsed_s: float, num_failed: int) -> None:
        assert name == self._part


@pytest.fixture
def engine(chat_tokenizer: ModelTokenizer) -> CachingEngine:
    return CachingEngine(chat_tokenizer.backend.encode("a", add_special_tokens=False).ids[0])


@pytest.fixture
def url(engine: CachingEngine, chat_tokenizer: ModelTokenizer) -> Iterator[str]:
    with live_app(engine, chat_tokenizer) as url:
        yield url


async def bench(
    url: str,
    *parts: str,
    seed: int = 7,
    scale: Scale = SMALL,
    timeout_s: float = LIVENESS_S,
    tokenizer: Path | None = None,
    watcher: Watched | None = None,
) -> Result:
    async with aclosing(OpenAIClient(url)) as client:
        prepared = await prepare(
            client, model=None, seed=seed, quick=False, tokenizer=tokenizer, timeout_s=timeout_s, scale=scale
        )
        await run_parts(prepared, list(parts or PARTS), watcher or Watched())
    return prepared.result


def shown(result: Result) -> str:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_report(result, console)
    return console.export_text()


async def test_every_part(engine: CachingEngine, url: str) -> None:
    watcher = Watched()
    result = await bench(url, watcher=watcher)
    assert result.complete
    assert not result.failures
    assert not result.notes
    assert watcher.ended == watcher.expected
    assert list(watcher.expected) == list(PARTS)
    parts = result.parts

    assert parts.prefix is not None
    for row, size in zip(parts.prefix, SMALL.prefix_sizes, strict=True):
        assert row.prompt_tokens == pytest.approx(size, rel=0.25)
        assert row.cold_cached_tokens is not None and row.cold_cached_tokens <= BLOCK_SIZE
        assert row.warm_cached_tokens is not None and row.warm_cached_tokens > 0.6 * size
        assert row.cold_ttft_s is not None and row.cold_ttft_s > 0
        assert row.warm_over_cold is not None and row.warm_over_cold > 0

    assert parts.decode is not None
    (decode,) = parts.decode
    assert decode.num_streams == 1
    assert decode.output_tokens == SMALL.decode_tokens
    # A token takes this engine a millisecond.
    assert decode.tokens_per_s is not None and 0 < decode.tokens_per_s < 1000

    assert parts.streams is not None
    assert parts.streams.num_streams == SMALL.num_streams
    assert parts.streams.output_tokens == SMALL.decode_tokens
    assert parts.streams.tokens_per_s is not None
    assert decode.tokens_per_s < parts.streams.tokens_per_s < SMALL.num_streams * 1000

    assert parts.chats is not None
    assert parts.chats.load.num_requests == SMALL.num_chats * SMALL.num_turns
    assert len(parts.chats.ttft_median_by_turn_s) == SMALL.num_turns
    assert parts.chats.cached_share_after_first_turn is not None
    assert 0.3 < parts.chats.cached_share_after_first_turn < 1

    for load in (parts.shared, parts.unique):
        assert load is not None
        assert load.num_requests == SMALL.num_requests
        assert load.output_tokens == 3 * SMALL.num_requests
        assert load.ttft is not None and load.request is not None
        assert load.ttft.min_s <= load.ttft.median_s <= load.ttft.p99_s <= load.request.p99_s
    assert parts.shared is not None and parts.unique is not None
    assert parts.shared.cached_share is not None and parts.shared.cached_share > 0.5
    assert parts.unique.cached_share is not None and parts.unique.cached_share < 0.3
    assert engine.max_num_in_flight == SMALL.num_streams > SMALL.concurrency

    assert parts.tiny is not None and parts.tiny.plain is not None and parts.tiny.stream is not None


async def test_the_result_as_json_is_what_its_schema_says(url: str) -> None:
    result = await bench(url)
    assert msgspec.json.decode(msgspec.json.encode(result), type=Result) == result
    schema = msgspec.json.schema(Result)["$defs"]
    as_json = msgspec.to_builtins(result)
    assert set(as_json) == set(schema["Result"]["properties"])
    assert set(as_json["parts"]) == set(schema["Parts"]["properties"]) == set(PARTS)


async def test_the_report_fits_a_terminal(url: str) -> None:
    text = shown(await bench(url))
    assert max(map(len, text.splitlines())) <= 80
    for title in ("Prefix cache", "Decode", "Many requests", "Chats", "Smallest request"):
        assert title in text


async def test_equal_seeds_send_equal_prompts_and_are_noticed(engine: CachingEngine, url: str) -> None:
    await bench(url, "prefix", "unique")
    first = sorted(request.prompt_token_ids for request in engine.requests)
    engine.requests.clear()
    again = await bench(url, "prefix", "unique")
    assert sorted(request.prompt_token_ids for request in engine.requests) == first
    assert any("cold prompts were cached already" in note for note in again.notes)
    assert any("unique prompts was cached already" in note for note in again.notes)
    assert "another --seed" in shown(again)
    assert not (await bench(url, "prefix", "unique", seed=8)).notes


async def test_with_a_tokenizer_prompts_have_their_size(engine: CachingEngine, url: str, chat_model_dir: Path) -> None:
    result = await bench(url, "prefix", tokenizer=chat_model_dir)
    assert result.run.tokens_per_word is None
    assert result.parts.prefix is not None
    for row, size in zip(result.parts.prefix, SMALL.prefix_sizes, strict=True):
        # The question of this tiny tokenizer is long.
        assert row.prompt_tokens == pytest.approx(size + 30, abs=40)


async def test_a_size_beyond_the_model_is_left_out(chat_tokenizer: ModelTokenizer) -> None:
    with live_app(CachingEngine(70, max_model_len=256), chat_tokenizer) as url:
        result = await bench(url, "prefix", "decode")
    assert result.parts.prefix is not None
    assert [row.target_tokens for row in result.parts.prefix] == [100]
    assert "left out, since the server takes 256 tokens: 300" in result.notes


async def test_requests_that_are_refused_are_counted(chat_tokenizer: ModelTokenizer) -> None:
    with live_app(CachingEngine(70, max_model_len=256), chat_tokenizer) as url:
        watcher = Watched()
        result = await bench(url, "shared", "tiny", watcher=watcher)
    failures = result.failures["shared"]
    assert sum(failures.values()) == SMALL.num_requests == watcher.ended["shared"]
    assert all(message.startswith("the server answered 400:") for message in failures)
    assert result.complete
    assert result.parts.shared is not None
    assert (result.parts.shared.num_requests, result.parts.shared.ttft) == (0, None)
    assert result.parts.tiny is not None and result.parts.tiny.plain is not None
    assert "failed: the server answered 400" in shown(result)


@pytest.mark.parametrize(
    ("last_words", "said"),
    [
        (events(chunk("a"), done=False), "the stream ended before the answer did"),
        (events(b"garbage"), "not the OpenAI API's"),
        (whole(b"", status="503 Busy"), "the server answered 503: Busy"),
    ],
)
async def test_a_server_that_turns_bad(last_words: bytes, said: str) -> None:
    result = await with_server_that_turns(last_words, "unique")
    assert result.complete
    assert sum(result.failures["unique"].values()) == SMALL.num_requests
    assert said in next(iter(result.failures["unique"]))


async def test_a_server_that_falls_silent_is_given_up() -> None:
    result = await with_server_that_turns(None, "prefix", "tiny", timeout_s=0.2)
    assert not result.complete
    assert result.failures["prefix"] == {"no whole answer within 0.2 s": 3}
    assert result.parts.tiny is None
    assert any("given up during prefix" in note for note in result.notes)
    assert "The run was not complete." in shown(result)


async def with_server_that_turns(response: bytes | None, *parts: str, timeout_s: float = LIVENESS_S) -> Result:
    """A run with a server that answers well until the parts begin."""
    well = events(chunk("a", "stop"), {"usage": {"prompt_tokens": 5, "completion_tokens": 1}})
    answer = answering(well)
    with canned_server(lambda head: answer(head)) as url:  # noqa: PLW0108 - looks `answer` up each time
        async with aclosing(OpenAIClient(url)) as client:
            settings: dict[str, Any] = {"model": None, "seed": 1, "quick": False, "tokenizer": None, "scale": SMALL}
            prepared = await prepare(client, timeout_s=LIVENESS_S, **settings)
            answer = answering(response)
            await run_parts(replace(prepared, timeout_s=timeout_s), list(parts), Watched())
    return prepared.result


async def test_a_server_without_counts_and_without_ignore_eos() -> None:
    refusals = iter([whole(b'{"error": {"message": "unknown field"}}', status="400 No")])

    def answer(head: str) -> bytes | None:
        if head.startswith("GET"):
            return answering(None)(head)
        return next(refusals, events(chunk("a"), chunk("b", "stop")))

    with canned_server(answer) as url:
        result = await bench(url, "decode")
    assert not result.run.ignore_eos
    assert result.run.tokens_per_word is None
    assert any("ignore_eos" in note for note in result.notes)
    assert any("does not count tokens" in note for note in result.notes)
    assert result.parts.decode is not None
    assert result.parts.decode[0].tokens_per_s is None


async def test_a_server_that_never_worked() -> None:
    with canned_server(answering(whole(b"", status="500 No"))) as url, pytest.raises(ServerError, match="500"):
        await bench(url)
    with canned_server(answering(None)) as url, pytest.raises(UnreachableError, match=r"no whole answer within 0\.2 s"):
        await bench(url, timeout_s=0.2)


def foreword_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=LIVENESS_S, check=False)


def test_the_command(url: str, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    ran = foreword_bench("--url", url, "--quick", "--parts", "tiny, unique", "--out", str(out))
    assert ran.returncode == 0, ran.stderr
    result = msgspec.json.decode(out.read_bytes(), type=Result)
    seed = re.search(r"--seed (\d+)", ran.stderr)
    assert seed is not None and int(seed[1]) == result.run.seed
    assert result.parts.tiny is not None and result.parts.unique is not None
    assert result.parts.prefix is None
    assert "Smallest request" in ran.stdout
    assert "\x1b" not in ran.stdout + ran.stderr


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    well = events(chunk("a", "stop"), {"usage": {"prompt_tokens": 5, "completion_tokens": 1}})
    answers = iter([whole(MODELS), *[well] * 3])
    out = tmp_path / "run.json"
    with canned_server(lambda _: next(answers, None)) as url:
        running = subprocess.Popen(
            [*COMMAND, "--url", url, "--parts", "prefix", "--out", str(out)], stderr=subprocess.PIPE, text=True
        )
        assert running.stderr is not None
        # What was asked before the parts is answered: the first request of a part is under way.
        assert "--seed" in running.stderr.readline()
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=LIVENESS_S)
    assert running.returncode == 130
    assert "Traceback" not in said
    assert not msgspec.json.decode(out.read_bytes(), type=Result).complete


def test_json_on_standard_output(url: str) -> None:
    ran = foreword_bench("--url", url, "--quick", "--parts", "tiny", "--seed", "3", "--out", "-")
    assert msgspec.json.decode(ran.stdout, type=Result).run.seed == 3
    assert "Smallest request" in ran.stderr


def test_failures_make_the_command_fail(chat_tokenizer: ModelTokenizer) -> None:
    with live_app(CachingEngine(70, max_model_len=256), chat_tokenizer) as url:
        ran = foreword_bench("--url", url, "--quick", "--parts", "shared")
    assert ran.returncode == 1
    assert "8 requests failed" in ran.stderr
    assert "the server answered 400" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parts", "prefix,nothing"], "'nothing' is no part"),
        (["--out", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json"),
        (["--url", "nonsense"], "is no URL"),
        (["--timeout", "0"], "--timeout"),
    ],
)
def test_mistakes(arguments: list[str], said: str) -> None:
    ran = foreword_bench(*arguments)
    assert ran.returncode == USER_ERROR_EXIT_CODE
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_tokenizer_that_is_none(url: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    ran = foreword_bench("--url", url, "--tokenizer", str(tmp_path))
    assert ran.returncode == USER_ERROR_EXIT_CODE
    assert f"cannot read a tokenizer from {tmp_path / 'tokenizer.json'}" in ran.stderr


def test_texts_are_their_seeds_and_names() -> None:
    texts = TextMaker(1)
    assert texts.words("a", 50) == TextMaker(1).words("a", 50)
    assert len(texts.words("a", 50).split()) == 50
    beginnings = {" ".join(TextMaker(seed).words(name, 50).split()[:4]) for seed in (1, 2) for name in ("a", "b", "c")}
    assert len(beginnings) == 6


@pytest.mark.parametrize("num_tokens", [1, 10, 333])
def test_texts_are_sized_by_a_tokenizer(chat_model_dir: Path, num_tokens: int) -> None:
    tokenizer = read_tokenizer(chat_model_dir)
    text = TextMaker(1, tokenizer=tokenizer).text("a", num_tokens)
    assert text
    assert text == text.strip()
    counted = len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert num_tokens - 12 <= counted <= max(num_tokens, 8)


def test_statistics() -> None:
    values = [float(value) for value in range(101)]
    assert percentile(values, 99) == 99
    assert percentile([1.0, 2.0], 25) == 1.25
    assert percentile([3.0], 99) == 3
    assert median([None, 1.0, 3.0]) == 2
    assert total([None, 2, 3]) == 5
    assert median([]) is total([None]) is spread([]) is ratio(1, 0) is ratio(None, 1) is None
    with pytest.raises(ValueError):
        percentile([], 50)


def test_each_part_has_its_place_in_the_result() -> None:
    assert tuple(PARTS) == Parts.__struct_fields__
