"""What a picture that came before costs, beside a text of as many tokens that came before.

    python -m benchmarks.repeated_picture [--kind llava] [--rounds 12] [NAME=URL ...]

Starts `foreword serve` with a model of `benchmarks.picture_models` and asks it over HTTP, in every round about another
picture (a JPEG of 1,024 × 1,024 in a data: URL) and another text. Prompts with the one and with the other have the same
number of tokens, the same number of them is cached, and they alternate, so their ratio is what pictures add. Times are
those until the first token of a stream, medians over all rounds. Others that serve the same directory (`--model-dir`)
under the name `pictures` are asked in turn. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import random
import re
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import uvloop
from PIL import Image

from benchmarks.frontend_overhead import free_port, running
from benchmarks.picture_models import KINDS, save_picture_model

MODEL_NAME = "pictures"
TARGET = 1.15
QUESTION_WORDS = 20
ANSWER_WORDS = 12
NUM_TURNS = 4
START_TIMEOUT_S = 300.0

_COUNTERS = {
    "decoded": "mm_decodes",
    "processed": "mm_processor_calls",
    "encoded": "encoder_calls",
    "bytes sent": "mm_input_bytes_sent",
}
_ENDED = re.compile(rb'"finish_reason":\s*"')

Content = list[dict[str, Any]]
Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """What was asked, about a picture or a text (`subject`)."""

    name: str
    subject: str


@dataclass(slots=True)
class Measured:
    """Of one server: seconds to the first token, what was counted meanwhile, and the cached tokens it told of."""

    ttft_s: dict[Case, list[float]] = field(default_factory=lambda: defaultdict(list))
    counted: dict[Case, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    cached_tokens: dict[str, set[int | None]] = field(default_factory=lambda: defaultdict(set))


class Server:
    """Any server of the OpenAI API, as one client at a time sees it. Only Foreword counts as we read it (`counts`)."""

    def __init__(self, url: str, *, counts: bool = False) -> None:
        self.url = url
        self.counts = counts
        self._parts = urlsplit(url)

    async def ask(self, messages: Messages) -> tuple[float, dict[str, Any]]:
        """Seconds until the first token of a stream, and the usage. Raises RuntimeError for any other answer."""
        body = json.dumps(
            {
                "model": MODEL_NAME,
                "messages": messages,
                "max_tokens": 1,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._parts.netloc}\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
        reader, writer = await asyncio.open_connection(self._parts.hostname, self._parts.port)
        received = b""
        started_s = time.perf_counter()
        writer.write(request)
        # The first token is the last, so what tells of it is the end of the choice.
        while not _ENDED.search(received):
            piece = await reader.read(1 << 16)
            if not piece:
                raise RuntimeError(f"{self.url} answered {received[-500:]!r}")
            received += piece
        ttft_s = time.perf_counter() - started_s
        received += await reader.read(-1)
        writer.close()
        events = [json.loads(data) for data in re.findall(rb"^data: (\{.*\})\r?$", received, re.MULTILINE)]
        return ttft_s, next(event["usage"] for event in events if event.get("usage"))

    async def counters(self) -> Counter[str]:
        """What was done to pictures so far, by the names of `_COUNTERS`; nothing for other servers."""
        if not self.counts:
            return Counter()
        async with httpx.AsyncClient(trust_env=False) as http:
            text = (await http.get(f"{self.url}/metrics")).text
        return Counter(
            {
                shown: round(sum(map(float, re.findall(rf"^foreword:{name}_total{{.*}} (\S+)$", text, re.MULTILINE))))
                for shown, name in _COUNTERS.items()
            }
        )

    async def wait_until_ready(self) -> None:
        ends_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                await self.ask(chat(text_part("Hi")))
                return
            except (OSError, RuntimeError) as error:
                if time.monotonic() > ends_s:
                    raise RuntimeError(f"{self.url} does not answer") from error
                await asyncio.sleep(0.5)


def single_tokens(model_dir: Path) -> list[str]:
    """Words with a space before them that are one token each, and stay so wherever they stand."""
    vocabulary = json.loads((model_dir / "tokenizer.json").read_bytes())["model"]["vocab"]
    return sorted(" " + token[1:] for token in vocabulary if re.fullmatch("Ġ[a-z]{4,}", token))


class Texts:
    """Random texts of as many tokens as words: the same ones for the same seed."""

    def __init__(self, words: Sequence[str], seed: str) -> None:
        self._words = words
        self._rng = random.Random(seed)

    def words(self, number: int) -> str:
        return "".join(self._rng.choices(self._words, k=number))


def picture(seed: int, side: int) -> bytes:
    """A JPEG with as much in it as a photograph has, unlike that of any other seed."""
    rng = np.random.default_rng(seed)
    layers = [
        Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)).resize((side, side), 3)
        for size in (4, 16, 64, 256)
    ]
    mixed = sum(np.asarray(layer, dtype=np.float32) * share for layer, share in zip(layers, (0.4, 0.3, 0.2, 0.1)))
    file = io.BytesIO()
    Image.fromarray(np.asarray(mixed, dtype=np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def picture_part(file: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{base64.b64encode(file).decode()}"}}


def chat(*parts: dict[str, Any]) -> Messages:
    return [{"role": "user", "content": list(parts)}]


def chat_of_turns(subject: dict[str, Any], texts: Texts) -> Iterator[Messages]:
    """The messages of one turn after the other, each with all that came before."""
    messages: Messages = []
    for turn in range(NUM_TURNS):
        said = [text_part(texts.words(QUESTION_WORDS))]
        messages.append({"role": "user", "content": [subject, *said] if turn == 0 else said})
        yield list(messages)
        messages.append({"role": "assistant", "content": texts.words(ANSWER_WORDS)})


async def measure(server: Server, measured: Measured, case: Case, messages: Messages) -> None:
    before = await server.counters()
    ttft_s, usage = await server.ask(messages)
    measured.ttft_s[case].append(ttft_s)
    measured.cached_tokens[case.name].add((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
    measured.counted[case].update(await server.counters() - before)


async def one_round(
    server: Server,
    measured: Measured,
    words: Sequence[str],
    seed: str,
    subjects: dict[str, Content],
    num_questions: int,
) -> None:
    """`subjects`: two pictures, and two texts of as many tokens, that are new. The second is for several turns."""
    texts = Texts(words, seed)
    order = list(subjects)

    async def each(name: str, chats: dict[str, Messages]) -> None:
        for subject in order:
            await measure(server, measured, Case(name, subject), chats[subject])
        order.reverse()

    def asked() -> dict[str, Messages]:
        question = text_part(texts.words(QUESTION_WORDS))
        return {name: chat(parts[0], question) for name, parts in subjects.items()}

    await each("new", asked())
    for _ in range(num_questions):
        chats = asked()
        await each("again, another question", chats)
        await each("the whole prompt again", chats)
    turns = {name: list(chat_of_turns(parts[1], Texts(words, seed))) for name, parts in subjects.items()}
    for turn in range(NUM_TURNS):
        await each("a chat's first turn" if turn == 0 else "later turns", {name: turns[name][turn] for name in turns})


async def num_words_like(server: Server, file: bytes, texts: Texts) -> int:
    """How many words are as many tokens as a picture."""
    question = text_part(texts.words(QUESTION_WORDS))
    _, with_picture = await server.ask(chat(picture_part(file), question))
    _, without = await server.ask(chat(question))
    number = int(with_picture["prompt_tokens"] - without["prompt_tokens"])
    _, with_words = await server.ask(chat(text_part(texts.words(number)), question))
    if with_words["prompt_tokens"] != with_picture["prompt_tokens"]:
        raise RuntimeError(
            f"{with_words['prompt_tokens']} tokens of text, {with_picture['prompt_tokens']} of a picture"
        )
    return number


async def compare(
    servers: dict[str, Server], model_dir: Path, *, rounds: int, num_questions: int, side: int
) -> dict[str, Measured]:
    seed = int(time.time())
    words = single_tokens(model_dir)
    results = {name: Measured() for name in servers}
    number = 0
    for server in servers.values():
        await server.wait_until_ready()
        number = await num_words_like(server, picture(seed, side), Texts(words, f"{seed}"))
    print(f"A picture is {number} tokens, a question {QUESTION_WORDS}.", file=sys.stderr)
    for n in range(rounds + 1):
        texts = Texts(words, f"{seed} {n}")
        subjects = {
            "picture": [picture_part(picture(seed + 1 + 2 * n + i, side)) for i in range(2)],
            "text": [text_part(texts.words(number)) for _ in range(2)],
        }
        for name, server in servers.items():
            # The first is not counted: what is done once is done then.
            measured = results[name] if n else Measured()
            await one_round(server, measured, words, f"{seed} {n} asked", subjects, num_questions)
        print(f"round {n} of {rounds}", file=sys.stderr)
    return results


def ratios(measured: Measured) -> dict[str, float]:
    """By what is asked: a picture's median divided by a text's."""
    names = dict.fromkeys(case.name for case in measured.ttft_s)
    return {name: _median_s(measured, name, "picture") / _median_s(measured, name, "text") for name in names}


def print_table(name: str, measured: Measured) -> None:
    """Markdown. What is counted is of one prompt with a picture."""
    columns = [
        f"{name}: TTFT",
        "picture, ms",
        "text, ms",
        "ratio",
        "cached tokens",
        *(_COUNTERS if any(measured.counted.values()) else ()),
    ]
    print(f"\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for asked, ratio in ratios(measured).items():
        case = Case(asked, "picture")
        counted = [f"{measured.counted[case][what] / len(measured.ttft_s[case]):,.4g}" for what in columns[5:]]
        cached = ", ".join(sorted(map(str, measured.cached_tokens[asked])))
        ms = [f"{_median_s(measured, asked, subject) * 1e3:,.1f}" for subject in ("picture", "text")]
        print(f"| {' | '.join([asked, *ms, f'{ratio:.2f}', cached, *counted])} |")


def _median_s(measured: Measured, asked: str, subject: str) -> float:
    return statistics.median(measured.ttft_s[Case(asked, subject)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", metavar="NAME=URL", help="serve the same directory")
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0])
    parser.add_argument("--model-dir", type=Path, help="where the model is kept; written if there is none")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--questions", type=int, default=4, help="in a round about each picture")
    parser.add_argument("--side", type=int, default=1024, help="of the pictures, in pixels")
    parser.add_argument("--flags", default="", help="further ones for foreword serve")
    arguments = parser.parse_args()
    with TemporaryDirectory() as directory, ExitStack() as stack:
        model_dir = arguments.model_dir or Path(directory)
        if not (model_dir / "config.json").exists():
            save_picture_model(arguments.kind, model_dir)
        port = free_port()
        command = "from frontend.cli import main; main()"
        flags = [
            "--port",
            str(port),
            "--served-model-name",
            MODEL_NAME,
            "--dtype",
            "bfloat16",
            *arguments.flags.split(),
        ]
        log = stack.enter_context((Path(directory) / "log").open("wb"))
        stack.enter_context(running(sys.executable, "-c", command, "serve", str(model_dir), *flags, log=log.fileno()))
        servers = {"Foreword": Server(f"http://127.0.0.1:{port}", counts=True)}
        servers |= {name: Server(url) for name, _, url in (peer.partition("=") for peer in arguments.peers)}
        results = uvloop.run(
            compare(
                servers,
                model_dir,
                rounds=arguments.rounds,
                num_questions=arguments.questions,
                side=arguments.side,
            )
        )
    for name, measured in results.items():
        print_table(name, measured)
    return 0 if ratios(results["Foreword"])["again, another question"] <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
