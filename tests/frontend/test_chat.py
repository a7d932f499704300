"""`foreword chat`: through a pipe and in a terminal, with the real application behind real HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from frontend.cli import USER_ERROR_EXIT_CODE
from frontend.prompt.tokenizer import ModelTokenizer
from ipc.vocabulary import EngineRequest, RequestOutput
from tests.frontend.canned_server import answering, canned_server, chunk, events, whole
from tests.frontend.live_app import live_app
from tests.frontend.scripted_engine import ScriptedEngine, says
from tests.wire_peers import wait_until

COMMAND = [sys.executable, "-c", "from frontend.cli import main; main()", "chat"]
# As its shell would start it, so that Ctrl-C reaches it.
IN_A_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from frontend.cli import main; main()"
LIVENESS_S = 60.0
ANSWER = "One two three."


class Served:
    def __init__(self, engine: ScriptedEngine, url: str, tokenizer: ModelTokenizer) -> None:
        self.engine = engine
        self.url = url
        self.tokenizer = tokenizer

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.backend.encode(text, add_special_tokens=False).ids

    def prompts(self) -> list[str]:
        return [self.tokenizer.backend.decode(r.prompt_token_ids) for r in self.engine.requests]


@pytest.fixture(scope="module")
def running(chat_tokenizer: ModelTokenizer) -> Iterator[Served]:
    engine = ScriptedEngine(says([]))
    with live_app(engine, chat_tokenizer) as url:
        yield Served(engine, url, chat_tokenizer)


@pytest.fixture
def served(running: Served) -> Served:
    running.engine.requests.clear()
    running.engine.aborted.clear()
    running.engine.script = says(running.ids(ANSWER), finish_reason="length", num_cached_tokens=5)
    return running


def piped(
    message: str | bytes, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [*COMMAND, *arguments],
        input=message if isinstance(message, bytes) else message.encode(),
        capture_output=True,
        timeout=LIVENESS_S,
        check=False,
        env=os.environ | (environment or {}),
    )
    return subprocess.CompletedProcess(result.args, result.returncode, result.stdout.decode(), result.stderr.decode())


def test_a_message_through_a_pipe(served: Served) -> None:
    result = piped("hi\nthere\n", "--url", served.url, "--system", "be kind", "--max-tokens", "50", "--seed", "3")
    assert result.returncode == 0
    assert result.stdout == f"{ANSWER}\n"
    (request,) = served.engine.requests
    num_prompt, num_generated = len(request.prompt_token_ids), len(served.ids(ANSWER))
    assert re.fullmatch(
        rf"{num_prompt} prompt tokens: 5 cached \+ {num_prompt - 5} new · {num_generated} generated"
        r" · TTFT [\d,]+ ms · [\d.,]+ tok/s · cut off: out of tokens\n",
        result.stderr,
    )
    assert "be kind" in served.prompts()[0]
    assert "hi\nthere" in served.prompts()[0]
    assert request.sampling_params.max_tokens == 50
    assert request.sampling_params.seed == 3


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["--api-key", "k3y"], {}),
        ([], {"FOREWORD_API_KEY": "k3y"}),
        # What a server takes several keys from.
        ([], {"FOREWORD_API_KEY": "k3y,another"}),
    ],
)
def test_the_key_is_sent(arguments: list[str], environment: dict[str, str]) -> None:
    def answer(head: str) -> bytes | None:
        if "authorization: bearer k3y" not in head.lower():
            return whole(b'{"error": {"message": "who are you?"}}', status="401 Unauthorized")
        return answering(events(chunk("welcome", "stop")))(head)

    with canned_server(answer) as url:
        assert "401: who are you?" in piped("hi", "--url", url).stderr
        assert piped("hi", "--url", url, *arguments, environment=environment).stdout == "welcome\n"


def test_the_salt_is_sent(served: Served) -> None:
    assert piped("hi", "--url", served.url, "--cache-salt", "mine").returncode == 0
    (request,) = served.engine.requests
    assert [span.kind for span in request.extra_key_spans] == ["cache_salt"]


def test_a_refusal_is_shown(served: Served) -> None:
    result = piped("hi", "--url", served.url, "--model", "unknown")
    assert (result.returncode, result.stdout) == (1, "")
    assert "the server answered 404" in result.stderr
    assert "unknown" in result.stderr
    assert "Traceback" not in result.stderr


def test_bytes_that_are_no_text(served: Served) -> None:
    assert piped(b"\xff\xfehi", "--url", served.url).returncode == 0
    assert "hi" in served.prompts()[0]


def test_an_empty_message(served: Served) -> None:
    result = piped(" \n", "--url", served.url)
    assert result.returncode == USER_ERROR_EXIT_CODE
    assert "no message" in result.stderr


def test_what_is_redirected_stays_as_it_came() -> None:
    with canned_server(answering(events(chunk("a\x1b[31m\x07b\n", "stop")))) as url:
        assert piped("hi", "--url", url).stdout == "a\x1b[31m\x07b\n"


def test_what_standard_output_cannot_spell_is_replaced() -> None:
    with canned_server(answering(events(chunk("caf\u00e9 \u2014 yes\n", "stop")))) as url:
        result = piped("hi", "--url", url, environment={"PYTHONIOENCODING": "ascii"})
    assert (result.returncode, result.stdout) == (0, "caf? ? yes\n")


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (whole(b'{"error": {"message": "on fire"}}', status="500 Oh"), "the server answered 500: on fire"),
        (events(chunk("begun"), done=False), "the stream ended before the answer did"),
        (events(b"nonsense"), "is not the OpenAI API's"),
    ],
)
def test_a_server_that_fails(response: bytes, said: str) -> None:
    with canned_server(answering(response)) as url:
        result = piped("hi", "--url", url)
    assert result.returncode == 1
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_no_server_at_all() -> None:
    with canned_server(answering(None)) as url:
        pass
    result = piped("hi", "--url", url)
    assert result.returncode == USER_ERROR_EXIT_CODE
    assert f"foreword: no server answers at {url}/v1" in result.stderr
    assert "foreword serve" not in result.stderr


def test_what_is_no_url() -> None:
    result = piped("hi", "--url", "localhost:8000")
    assert result.returncode == USER_ERROR_EXIT_CODE
    assert "'localhost:8000' is no URL like http://127.0.0.1:8000" in result.stderr


class Terminal:
    """A person at `foreword chat` in a terminal."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self._master = master
        self.process = process
        self._unread = ""

    def type(self, keys: str, *, after: str = "> ") -> None:
        """Keys that come before the prompt would be the terminal's, not readline's."""
        self.until(after)
        os.write(self._master, keys.encode())

    def interrupt(self, text: str) -> None:
        """Ctrl-C until `text` is shown. Python notices one that comes just before it waits for keys only then; and one
        that empties the terminal's input after readline was told that there is some, only with another key.
        """
        for attempt in range(20):
            os.write(self._master, b" " if attempt % 2 else b"\x03")
            heard_s = time.monotonic() + LIVENESS_S / 20
            while text not in self._unread and time.monotonic() < heard_s:
                self._read(0.5)
            if text in self._unread:
                break
        self.until(text)

    def until(self, text: str) -> str:
        """All that was shown up to `text`, colours left out."""
        deadline_s = time.monotonic() + LIVENESS_S
        while text not in self._unread:
            assert time.monotonic() < deadline_s, self._unread
            self._read(0.5)
        shown, self._unread = self._unread.split(text, 1)
        return shown + text

    def _read(self, timeout_s: float) -> None:
        """What is shown next, if anything is."""
        ready, _, _ = select.select([self._master], [], [], timeout_s)
        if ready:
            try:
                received = os.read(self._master, 1 << 16)
            except OSError:
                raise AssertionError(f"it ended after {self._unread!r}") from None
            self._unread = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self._unread + received.decode())

    def ends(self) -> int:
        return self.process.wait(LIVENESS_S)


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, "chat", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "200", "INPUTRC": os.devnull},
    )
    os.close(slave)
    try:
        yield Terminal(master, process)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_a_conversation_in_a_terminal(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    with terminal("--url", served.url) as person:
        person.until("/help lists commands")
        for question in ("first", "second"):
            person.type(f"{question}\r")
            assert ANSWER in person.until("tok/s")
        person.type("/undo\r")
        person.until("forgotten: second")
        person.type("/system be brief\r")
        person.until("system prompt set")
        person.type("third \\\r")
        person.type("and more\r", after=". ")
        person.until("tok/s")
        person.type(f"/save {file}\r")
        person.until("saved in")
        person.type("/reset\r")
        person.until("a new conversation")
        person.type("/what\r")
        person.until("/what is no command")
        # The history: the line before this one but one.
        person.type("\x1b[A\x1b[A\x1b[A\x1b[A\r")
        person.until("tok/s")
        person.type("\x04")
        assert person.ends() == 0
    first, second, third, fourth = served.prompts()
    assert "first" in first
    assert first.count(ANSWER) == 0
    assert second.count(ANSWER) == 1
    assert "be brief" in third
    assert "second" not in third
    assert "third \nand more" in third
    assert "be brief" in fourth
    assert "first" not in fourth
    saved = json.loads(file.read_text())["messages"]
    assert [message["role"] for message in saved] == ["system", "user", "assistant", "user", "assistant"]
    assert saved[-1]["content"] == ANSWER


def test_ctrl_c_stops_the_answer_and_the_servers_work_but_not_the_chat(served: Served) -> None:
    piece = served.ids("again and again ")

    async def for_ever(request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        while True:
            yield RequestOutput(request.request_id, piece)
            await asyncio.sleep(0.01)

    served.engine.script = for_ever
    with terminal("--url", served.url) as person:
        person.type("go\r")
        person.type("\x03", after="again and")
        person.until("stopped")
        wait_until(lambda: served.engine.num_in_flight == 0)
        assert len(served.engine.aborted) == 1
        served.engine.script = says(served.ids(ANSWER), finish_reason="length")
        person.type("half a li")
        person.interrupt("Ctrl-D ends")
        person.type("next\r")
        person.until(ANSWER)
        person.until("tok/s")
        person.type("\x04")
        assert person.ends() == 0
    # What was said until the stop belongs to the conversation; the line that was given up does not.
    assert "again and" in served.prompts()[-1]
    assert "half a li" not in served.prompts()[-1]


def test_a_turn_that_failed_is_not_kept(served: Served) -> None:
    with terminal("--url", served.url) as person:
        person.type("word " * 300 + "\r")
        person.until("the server answered 400")
        person.type("short\r")
        person.until("tok/s")
        person.type("\x04")
        assert person.ends() == 0
    assert "word word" not in served.prompts()[-1]


def test_an_answer_cannot_steer_the_terminal() -> None:
    with (
        canned_server(answering(events(chunk("safe\x1b]0;title\x07 \x9b2J and\tsound\n", "stop")))) as url,
        terminal("--url", url) as person,
    ):
        person.type("hi\r")
        shown = person.until("sound")
        assert "safe]0;title 2J and" in shown
        assert "\x07" not in shown


def test_tab_completes_a_command(served: Served) -> None:
    with terminal("--url", served.url) as person:
        person.type("/und\t\r")
        person.until("there is nothing to undo")
        person.type("\x04")
        assert person.ends() == 0
