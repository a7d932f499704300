"""What comes out of a GGUF file is the model that went in: weights, tokenizer, chat template, and when to stop."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import safetensors
import torch
import transformers

from engine_core.model import gguf
from tests.wire_peers import ROOT, is_alive, wait_until


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a process that asked for SmolLM2 was given, and what it logged."""

    path: Path
    log: str


@pytest.fixture(scope="module")
def smollm2_conversions(tmp_path_factory: pytest.TempPathFactory) -> list[Conversion]:
    """Two processes ask at the same time, and nobody did before."""
    cache = tmp_path_factory.mktemp("cache")
    code = (
        "import logging, sys; logging.basicConfig(level=logging.INFO); from pathlib import Path;"
        f"from engine_core import resolve_model; print(resolve_model('smollm2', Path({str(cache)!r})).path)"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return [Conversion(Path(printed.strip()), log) for printed, log in outputs]


@pytest.fixture(scope="module")
def smollm2(smollm2_conversions: list[Conversion]) -> Path:
    """Converted by what is tested here, not by what was installed before."""
    return smollm2_conversions[0].path


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> transformers.PreTrainedTokenizerFast:
    return transformers.AutoTokenizer.from_pretrained(smollm2, local_files_only=True)


@pytest.mark.parametrize(("text", "token_id"), [("<|endoftext|>", 0), ("<|im_start|>", 1), ("<|im_end|>", 2)])
def test_special_tokens_are_single_ids(
    tokenizer: transformers.PreTrainedTokenizerFast, text: str, token_id: int
) -> None:
    assert tokenizer(text).input_ids == [token_id]
    assert tokenizer(f"a{text}b").input_ids[1] == token_id
    assert tokenizer.decode([token_id], skip_special_tokens=True) == ""


def test_numbers_are_split_into_digits(tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    assert [tokenizer.decode(token) for token in tokenizer("12345").input_ids] == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [("\n\n12", ["\n\n", "1", "2"]), ("a  7", ["a", "  ", "7"]), ("in 2024,", ["in", " ", "2", "0", "2", "4", ","])],
)
def test_digits_are_split_off_before_whitespace_is(
    tokenizer: transformers.PreTrainedTokenizerFast, text: str, pieces: list[str]
) -> None:
    """Where the plain byte-level split, which the reader falls back to, gives other tokens."""
    assert [tokenizer.decode(token) for token in tokenizer(text).input_ids] == pieces


def test_text_survives_the_round_trip(tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    text = "Zwölf Boxkämpfer 👩‍👩‍👧 jagen 12 Viktor; 日本語\n\n\tdef f(x): return x**2\r\n  ½"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_no_token_is_added_around_a_text(tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    assert tokenizer("").input_ids == []
    assert tokenizer.decode(tokenizer("Hello").input_ids) == "Hello"


def test_the_chat_template_renders_turns(tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    default = tokenizer.apply_chat_template(messages[1:], tokenize=False)
    assert default.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


def test_a_turn_ends_the_generation(smollm2: Path, tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    generation_config = json.loads((smollm2 / "generation_config.json").read_text())
    assert generation_config["eos_token_id"] == [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.model_max_length == 8192


def test_weights_are_bfloat16_and_stay_tied(smollm2: Path) -> None:
    with safetensors.safe_open(smollm2 / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert json.loads((smollm2 / "config.json").read_text())["tie_word_embeddings"] is True
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, local_files_only=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_it_speaks(smollm2: Path, tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    """The one check that sees weights read into the wrong places."""
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, local_files_only=True)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=16)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    assert output[-1] == tokenizer.eos_token_id


def test_two_processes_convert_it_once(smollm2_conversions: list[Conversion]) -> None:
    """The second waits for the first and then finds the work done."""
    one, other = smollm2_conversions
    assert one.path == other.path
    assert sum("gguf_converted" in conversion.log for conversion in smollm2_conversions) == 1
    assert sorted(path.name for path in one.path.parent.iterdir()) == [one.path.name, f"{one.path.name}.lock"]


def test_what_an_interrupted_conversion_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tmp_path / "some[1].gguf"
    weights.write_bytes(b"weights")
    name = f"some[1]-{gguf._digests([weights])[1]}"
    left, left_whole, foreign = (tmp_path / f".{each}" for each in (f"{name}-abc", f"{name}-abc-whole", "other-abc"))
    for directory in (left, left_whole, foreign):
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"half")
    monkeypatch.setattr(gguf, "_convert_apart", lambda weights, directory: (directory / "config.json").write_text("{}"))
    assert gguf.converted_gguf([weights], tmp_path) == tmp_path / name
    assert not left.exists() and not left_whole.exists()
    assert foreign.exists()


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    contents = [b"GGUF", b"", b" in parts"]
    parts = [tmp_path / "elsewhere" / str(number) / f"some.gguf.part0{number}" for number in range(len(contents))]
    for part, content in zip(parts, contents, strict=True):
        part.parent.mkdir(parents=True)
        part.write_bytes(content)
    return parts


def test_a_file_in_parts_is_the_file(parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tmp_path / "some.gguf"
    whole.write_bytes(b"GGUF in parts")
    converted = []

    def convert(weights: Path, directory: Path) -> None:
        converted.append((weights.name, weights.read_bytes()))
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(gguf, "_convert_apart", convert)
    models = tmp_path / "models"
    sha256 = hashlib.sha256(whole.read_bytes()).hexdigest()
    directory = gguf.converted_gguf(parts, models, sha256=sha256)
    assert converted == [("some.gguf", b"GGUF in parts")]
    assert gguf.converted_gguf([whole], models) == directory
    assert len(converted) == 1
    assert sorted(models.iterdir()) == [directory, models / f"{directory.name}.lock"]


def test_parts_of_another_file_are_not_converted(parts: list[Path], tmp_path: Path) -> None:
    sha256 = hashlib.sha256(b"GGUF in parts").hexdigest()
    with pytest.raises(gguf.GgufConversionError, match=f"its SHA-256 should be {sha256}, but is "):
        gguf.converted_gguf(parts[::-1], tmp_path / "models", sha256=sha256)
    assert not (tmp_path / "models").exists()


def test_a_conversion_ends_with_the_process_that_wants_it(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from engine_core import resolve_model;"
    code += "resolve_model('smollm2', Path(sys.argv[1]))"
    wanting = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=Path(gguf.__file__).parents[2])
    try:
        wait_until(lambda: psutil.Process(wanting.pid).children())
        (conversion,) = psutil.Process(wanting.pid).children()
    finally:
        wanting.kill()
        wanting.wait()
    wait_until(lambda: not is_alive(conversion.pid))


def test_the_digest_is_of_the_bytes_not_of_the_name(tmp_path: Path) -> None:
    for name, content in [("a", b"one"), ("b", b"one"), ("c", b"two")]:
        (tmp_path / name).write_bytes(content)
    digests = [gguf._digests([tmp_path / name])[1] for name in "abc"]
    assert digests[0] == digests[1] != digests[2]


def test_an_unknown_pre_tokenizer_is_reported(
    tokenizer: transformers.PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    from tokenizers import pre_tokenizers

    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    with caplog.at_level(logging.WARNING):
        gguf._restore_pre_tokenizer(tokenizer, {"pre": "gpt-2"})
        assert not caplog.records
        gguf._restore_pre_tokenizer(tokenizer, {"pre": "from-the-future"})
    assert "gguf_pre_tokenizer_unknown name=from-the-future" in caplog.text


def test_every_end_of_turn_token_counts_once() -> None:
    assert gguf._end_of_turn_ids({"eos_token_id": 5, "eot_token_id": 7, "eom_token_id": 5}) == [5, 7]


def test_a_signal_waits_until_the_child_is_known_even_if_another_thread_is_given_it() -> None:
    """Python handles it in the main thread, in the middle of whatever that does: a masked signal is no help."""
    code = """
import os, signal, threading
from engine_core.model import gguf

done = threading.Event()
threading.Thread(target=done.wait, daemon=True).start()
made = False
try:
    with gguf._no_signals():
        os.kill(os.getpid(), signal.SIGINT)
        done.wait(0.2)
        made = True
except KeyboardInterrupt:
    print("made" if made else "interrupted")
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout == "made\n"
