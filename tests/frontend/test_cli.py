"""The command line: what a person sees, and how their mistakes are answered."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, get_args, get_origin

import msgspec
import psutil
import pytest
import typer

from engine_core import EngineConfig, ResolvedModel
from frontend.api_key import ADMIN_API_KEY_ENV, API_KEY_ENV
from frontend.cli import USER_ERROR_EXIT_CODE
from frontend.cli.app import app
from frontend.cli.kv_events import published_kv_events
from frontend.cli.server_options import DEFAULT_URL, fail_without_server
from frontend.cli.start import own_names
from frontend.http_config import listen
from frontend.sizes import parse_size
from frontend.version import foreword_version
from ipc.logs import LOG_FORMAT_ENV
from tests.wire_peers import wait_until

COMMAND = [sys.executable, "-c", "from frontend.cli import main; main()"]


def foreword(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    settings = os.environ | (environment or {})
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=120, check=False, env=settings
    )


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == USER_ERROR_EXIT_CODE
    assert "Traceback" not in result.stderr
    return result.stderr


def unframed(text: str) -> str:
    """Without the frame of an error, which breaks its lines anywhere."""
    return " ".join(text.replace("│", " ").split())


def test_version() -> None:
    assert foreword("--version").stdout.strip() == f"foreword {foreword_version()}"


def test_help_names_every_setting_of_the_engine_in_a_narrow_terminal() -> None:
    result = foreword("serve", "--help", environment={"COLUMNS": "80"})
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    flags = set(re.findall(r"--[a-z-]+", result.stdout))
    settings = set(EngineConfig.__struct_fields__) - {"model", "model_name"}
    assert {"--" + name.replace("_", "-") for name in settings} <= flags
    assert {"--host", "--port", "--served-model-name", "--api-key", "--log-format", "--log-level"} <= flags
    assert {"--limit-mm-per-prompt", "--allowed-media-domains", "--mm-processor-kwargs", "--max-image-pixels"} <= flags
    engine_panels = ("Model", "KV cache memory", "Scheduler", "Admission", "Prefix cache", "Pictures in the engine")
    for panel in ("HTTP", "Log", "Pictures", "KV cache events", *engine_panels):
        assert f"─ {panel} ─" in result.stdout


COMMANDS = tuple(typer.main.get_group(app).commands)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_is_grouped_and_ends_with_examples(command: str) -> None:
    shown = foreword(command, "--help", environment={"COLUMNS": "80"}).stdout
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert f"Usage: foreword {command} " in shown
    panels = re.findall(r"^╭─ (.*?) ─+╮$", shown, re.MULTILINE)
    assert len(panels) > 2
    assert panels[-1] == "Examples"
    examples = shown.split("─ Examples ─")[1]
    assert f"│ foreword {command}" in examples
    # Every option of an example exists.
    flags = re.findall(r"--[a-z-]+", shown.split("─ Examples ─")[0])
    assert set(re.findall(r"--[a-z-]+", examples)) <= set(flags)
    # Types, ranges and switches in words.
    assert not re.search(r"<|x>=|default: (no-)?enable", shown)


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_lists_the_commands(arguments: list[str]) -> None:
    shown = foreword(*arguments, environment={"COLUMNS": "80"}).stdout
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert all(re.search(rf"^│ {command} +[A-Z]", shown, re.MULTILINE) for command in COMMANDS)
    assert "─ Examples ─" in shown
    assert "--install-completion" in shown


@pytest.mark.parametrize(
    ("shell", "registers"),
    [
        ("bash", "complete -o default -F _foreword_completion foreword"),
        ("zsh", "compdef _foreword_completion foreword"),
        ("fish", "complete --command foreword"),
    ],
)
def test_the_completion_script_of_each_shell(shell: str, registers: str) -> None:
    script = foreword(environment={"_FOREWORD_COMPLETE": f"source_{shell}"}).stdout
    assert registers in script
    assert f"_FOREWORD_COMPLETE=complete_{shell}" in script


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("foreword ", set(COMMANDS)),
        ("foreword serve --max-num-q", {"--max-num-queued-requests", "--max-num-queued-tokens"}),
        ("foreword serve --dtype b", {"bfloat16"}),
        ("foreword chat --te", {"--temperature"}),
        ("foreword bench --q", {"--quick"}),
        ("foreword bench --nothing", set()),
    ],
)
def test_completion(typed: str, offered: set[str]) -> None:
    words = typed.split(" ")
    settings = {"_FOREWORD_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    assert set(foreword(environment=settings).stdout.split()) == offered
    described = {"_FOREWORD_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": typed}
    shown = foreword(environment=described).stdout
    assert all(f'"{word}"' in shown for word in offered)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_with_the_script_that_is_shown(tmp_path: Path) -> None:
    command = tmp_path / "foreword"
    command.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    command.chmod(0o755)
    script = """
eval "$(foreword --show-completion)"
COMP_WORDS=(foreword serve --served) COMP_CWORD=2
_foreword_completion foreword
echo "${COMPREPLY[*]}"
"""
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "--norc", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=os.environ | {"PATH": path},
    )
    assert result.stdout.strip() == "--served-model-name"


@pytest.mark.parametrize(("url", "told_how_to_start"), [(DEFAULT_URL, True), ("http://elsewhere:8000", False)])
def test_without_a_server_where_ours_would_be(
    url: str, told_how_to_start: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit):
        fail_without_server(url, "nobody is there")
    said = capsys.readouterr().err
    assert "nobody is there" in said
    assert ("foreword serve" in said) == told_how_to_start


def test_a_model_that_does_not_exist(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    assert str(missing) in one_line(foreword("serve", str(missing), "--port", "0"))


def test_a_port_in_use() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert f"127.0.0.1:{port}" in one_line(foreword("serve", "--port", str(port)))


def test_a_size_that_is_none() -> None:
    assert "is not a size" in one_line(foreword("serve", "--kv-cache-memory-bytes", "much"))


def test_every_number_that_is_no_integer_has_an_end() -> None:
    """Neither JSON nor a timer knows infinity: it would end a process instead of the command."""
    commands = [command.callback for command in app.registered_commands if command.callback is not None]
    declared = [
        (parameter.name, *get_args(parameter.annotation))
        for command in commands
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if get_origin(parameter.annotation) is Annotated
    ]
    floats = [(name, info) for name, kind, info in declared if float in (kind, *get_args(kind))]
    assert len(floats) >= 8
    endless = [name for name, info in floats if info.max is None]
    assert endless == []


def test_an_empty_name() -> None:
    assert "a name must not be empty" in one_line(foreword("serve", "--served-model-name", ""))


@pytest.mark.parametrize("option", ["--api-key", "--admin-api-key"])
@pytest.mark.parametrize("key", ["", "with,comma"])
def test_an_api_key_that_no_client_could_send_is_refused_and_not_repeated(option: str, key: str) -> None:
    said = one_line(foreword("serve", option, key))
    assert "an API key must not be empty" in said
    assert not key or key not in said


@pytest.mark.parametrize("variable", [API_KEY_ENV, ADMIN_API_KEY_ENV])
def test_an_api_key_in_the_environment_is_checked_too(variable: str) -> None:
    said = one_line(foreword("serve", environment={variable: "good,no good"}))
    assert said.startswith(f"foreword: {variable}: an API key must not be empty")
    assert "no good" not in said


def test_kv_events_that_nobody_could_get_are_refused_before_anything_is_loaded() -> None:
    refused = one_line(foreword("serve", "--kv-events-config", '{"enable_kv_cache_events": true}'))
    assert "kv_events_config.endpoint" in refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("yes", "malformed"),
        ('{"enabled": true}', "unknown field `enabled`"),
        ('{"enable_kv_cache_events": true, "publisher": "null"}', "null publishes nothing"),
        ('{"enable_kv_cache_events": true, "endpoint": "tcp://*:0"}', "port must be in 1 … 65535"),
        ('{"enable_kv_cache_events": true, "endpoint": "ipc:///tmp/x"}', "it must be 0700"),
    ],
)
def test_settings_of_kv_events_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        published_kv_events(text)


def test_isolation_by_keys_that_nobody_is_asked_for() -> None:
    said = one_line(foreword("serve", "--cache-isolation", "api-key"))
    assert said.startswith("foreword: --cache-isolation api-key")
    assert API_KEY_ENV in said
    assert "'none', 'salt', 'api-key'" in unframed(one_line(foreword("serve", "--cache-isolation", "key")))


def test_a_log_format_that_does_not_exist() -> None:
    assert "xml" in one_line(foreword("serve", "--log-format", "xml"))
    refused = unframed(one_line(foreword("serve", environment={LOG_FORMAT_ENV: "xml"})))
    assert f"(env var: '{LOG_FORMAT_ENV}'): 'xml' is not one of 'text', 'json'" in refused


def test_a_cache_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = one_line(
        foreword("serve", "smollm2", "--port", "0", environment={"FOREWORD_CACHE_DIR": str(tmp_path / "file")})
    )
    assert said.count("\n") == 1
    assert f"below {tmp_path / 'file'}: Not a directory" in said
    assert "FOREWORD_CACHE_DIR" in said


def test_what_a_model_is_called(tmp_path: Path) -> None:
    weights = tmp_path / "some.Q4.gguf"
    weights.touch()
    assert own_names(str(weights), ResolvedModel(tmp_path, "some.Q4")) == ("some.Q4",)
    assert own_names("SmolLM2-135M-Instruct", ResolvedModel(tmp_path, "smollm2")) == (
        "smollm2",
        "SmolLM2-135M-Instruct",
    )
    assert own_names("owner/name", ResolvedModel(tmp_path, "owner/name")) == ("owner/name",)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_first_conversion_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    serving = subprocess.Popen(
        [*COMMAND, "serve", "smollm2", "--port", "0"],
        env=os.environ | {"FOREWORD_CACHE_DIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    with serving:
        wait_until(lambda: any("engine_core.model.gguf" in child.cmdline() for child in children(serving)))
        (conversion,) = children(serving)
        assert any(path.is_dir() for path in (tmp_path / "models").iterdir())
        serving.send_signal(number)
        _, said = serving.communicate(timeout=30)
    assert serving.returncode == 128 + number
    assert "Traceback" not in said
    assert not psutil.pid_exists(conversion.pid)
    assert [path.suffix for path in (tmp_path / "models").iterdir()] == [".lock"]


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children()


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("0", 0), ("12", 12), ("2GiB", 2 << 30), ("2 gib", 2 << 30), ("1.5G", 1_500_000_000), ("64Ki", 65536)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 PiB", "2iB", "1e9"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_the_command_line_and_the_http_process_load_no_torch(chat_model_dir: Path) -> None:
    script = """
import sys
import frontend.cli
print([name for name in ("torch", "transformers", "litestar", "httpx", "tokenizers") if name in sys.modules])
from frontend import http_process
http_process._keep_torch_out()
from frontend.prompt.tokenizer import load_tokenizer
tokenizer = load_tokenizer(__import__("pathlib").Path(sys.argv[1]))
print(sys.modules["torch"], len(tokenizer.backend.encode("one two", add_special_tokens=False)) > 0)
"""
    command = [sys.executable, "-c", script, str(chat_model_dir)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.split() == ["[]", "None", "True"]


def test_a_model_directory_without_tokenizer_is_a_start_up_failure(tmp_path: Path) -> None:
    from frontend.http_config import EngineAddress, HttpConfig, child_argv
    from ipc.process import STARTUP_FAILURE_EXIT_CODE

    config = HttpConfig(
        engines=(EngineAddress("ipc:///tmp/unused"),), model_dir=str(tmp_path), model_names=("x",), port=0
    )
    assert msgspec.json.decode(child_argv(config)[-1], type=HttpConfig) == config
    result = subprocess.run(child_argv(config), capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == STARTUP_FAILURE_EXIT_CODE
    assert "http_start_failed" in result.stderr
    assert str(tmp_path) in result.stderr
