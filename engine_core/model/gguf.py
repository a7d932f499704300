"""Unpack a GGUF file once into a transformers directory: bfloat16 safetensors, tokenizer, chat template.

The reading is transformers' own. What it loses is put back here: how some vocabularies split text before
merging (`tokenizer.ggml.pre`), and the further tokens that end a turn. A conversion runs in a process of its own
(`python -m engine_core.model.gguf FILE DIRECTORY`), so that whoever asks for it never holds torch and the weights.
"""

from __future__ import annotations

import fcntl
import functools
import glob
import hashlib
import io
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from ipc.logs import configure_logging
from ipc.process import SUPERVISED_ENV, exit_with_supervisor

from .progress import transformers_progress

logger = logging.getLogger(__name__)

# Part of the cache key: raise it when the same file should come out differently.
CONVERSION_VERSION = 1
_CHUNK_BYTES = 1 << 20

_ENDING_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})

# Names that `tokenizer.ggml.pre` has for the two splits that a plain byte-level tokenizer can mean.
_DIGIT_SPLITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
_PLAIN_SPLITS = frozenset({"gpt-2", "gpt2", "phi-2", "olmo", "mpt", "jais", "trillion"})


class GgufConversionError(Exception):
    """The file cannot be turned into a transformers directory; the message says why."""


def converted_gguf(parts: Sequence[Path], models_dir: Path, *, sha256: str | None = None) -> Path:
    """The transformers directory made from a file: `models_dir/<stem>-<digest>`, made now if it is not there.

    The file is what its `parts` hold, one after the other; one part is the file itself. The digest covers its bytes,
    whose SHA-256 must be `sha256` if that is given. The directory appears complete or not at all, and is made once
    however many processes ask for it at the same time.

    Raises:
        GgufConversionError: not the file that was meant, no GGUF file, or of an architecture transformers cannot read
            from one.
        OSError: a part cannot be read, or `models_dir` not be written.
    """
    bytes_sha256, digest = _digests(parts)
    if sha256 not in (None, bytes_sha256):
        raise GgufConversionError(f"its SHA-256 should be {sha256}, but is {bytes_sha256}")
    stem = _stem(parts)
    target = models_dir / f"{stem}-{digest}"
    if target.is_dir():
        return target
    models_dir.mkdir(parents=True, exist_ok=True)
    with _locked(models_dir / f"{target.name}.lock"):
        if target.is_dir():
            return target
        # Nobody else is converting, so whatever lies here belongs to a process that was killed.
        for leftover in models_dir.glob(f"{glob.escape(f'.{target.name}-')}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=models_dir))
        try:
            with _whole(parts, scratch.with_name(f"{scratch.name}-whole"), f"{stem}.gguf") as weights:
                _convert_apart(weights, scratch)
            scratch.chmod(0o755)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    logger.info("gguf_converted file=%s parts=%d directory=%s", parts[0], len(parts), target)
    return target


def _stem(parts: Sequence[Path]) -> str:
    """`model` for `model.gguf`, and for `model.gguf.part00` and those that follow it."""
    return parts[0].name.rpartition(".gguf")[0]


def _digests(parts: Sequence[Path]) -> tuple[str, str]:
    """The SHA-256 of all the bytes; and what tells conversions apart."""
    digest = hashlib.sha256()
    for part in parts:
        with part.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    bytes_sha256 = digest.hexdigest()
    digest.update(b"foreword-gguf-%d" % CONVERSION_VERSION)
    return bytes_sha256, digest.hexdigest()[:16]


@contextmanager
def _whole(parts: Sequence[Path], directory: Path, name: str) -> Iterator[Path]:
    """The file that `parts` are of: itself, or put together in `directory`, which is gone afterwards."""
    if len(parts) == 1:
        yield parts[0]
        return
    directory.mkdir()
    try:
        with (directory / name).open("xb") as whole:
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, whole, _CHUNK_BYTES)
        yield directory / name
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _locked(lock_path: Path) -> Iterator[None]:
    """Hold `lock_path` exclusively. The file stays: removing it would let two processes lock different inodes."""
    descriptor = os.open(lock_path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _convert_apart(weights: Path, directory: Path) -> None:
    arguments = [sys.executable, "-m", __name__, str(weights.absolute()), str(directory.absolute())]
    child = None
    try:
        # The pipe to its standard input tells the child when we are gone; a terminal's Ctrl-C is ours to pass on.
        with _no_signals():
            child = subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, SUPERVISED_ENV: "1"},
                start_new_session=True,
            )
        assert child.stdout is not None
        reason = child.stdout.read().strip()
        status = child.wait()
    finally:
        if child is not None:
            with child:
                child.kill()
    if status:
        raise GgufConversionError(reason or f"the conversion ended with status {status}")


@contextmanager
def _no_signals() -> Iterator[None]:
    """They come afterwards: a child whose making is interrupted would be nobody's to end.

    Blocking them would not do: another thread may be given them, and Python handles them in the main one all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda which, _: came.append(which)) for number in _ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None is one that Python does not know and cannot set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for arrived in came:
            signal.raise_signal(arrived)


def _convert(weights: Path, directory: Path) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # The stream is fixed here because `_quiet` replaces `sys.stderr`.
    with Progress(*columns, console=Console(file=sys.stderr), redirect_stderr=False) as progress:
        task = progress.add_task(f"Preparing {weights.name} (once): tokenizer", total=3)
        import torch
        import transformers

        source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
        try:
            with _quiet(), _reading_once():
                tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
                progress.update(task, advance=1, description=f"Preparing {weights.name} (once): reading weights")
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    **source, quantization_config=transformers.GgufConfig(dequantize=True), dtype=torch.bfloat16
                )
                metadata = _read_metadata(weights)
        # transformers and gguf raise all sorts of errors for a file they cannot read.
        except Exception as error:
            raise GgufConversionError(f"transformers cannot read it: {type(error).__name__}: {error}") from error

        progress.update(task, advance=1, description=f"Preparing {weights.name} (once): writing")
        _restore_pre_tokenizer(tokenizer, metadata)
        tokenizer.model_max_length = model.config.max_position_embeddings
        model.generation_config = transformers.GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=_end_of_turn_ids(metadata),
            pad_token_id=tokenizer.pad_token_id,
        )
        with _quiet():
            model.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
        for file in directory.iterdir():
            file.chmod(0o644)
        progress.update(task, advance=1, description=f"Prepared {weights.name}")


@contextmanager
def _quiet() -> Iterator[None]:
    """One progress bar is enough: silence those of transformers, also the one that ignores its own switch."""
    with transformers_progress(shown=False), redirect_stderr(io.StringIO()):
        yield


@contextmanager
def _reading_once() -> Iterator[None]:
    """Within, a file's metadata is read once. transformers reads all of it for each thing it wants to know, which
    takes ten seconds each time if the vocabulary is large."""
    import gguf

    reader = gguf.GGUFReader
    gguf.GGUFReader = functools.cache(reader)
    try:
        yield
    finally:
        gguf.GGUFReader = reader


def _read_metadata(weights: Path) -> dict[str, Any]:
    """The tokenizer's scalar fields, by their name after `tokenizer.ggml.`."""
    from gguf import GGUFReader

    fields = GGUFReader(str(weights)).fields
    prefix = "tokenizer.ggml."
    wanted = {"pre", "eos_token_id", "eot_token_id", "eom_token_id"}
    return {name: fields[prefix + name].contents() for name in wanted if prefix + name in fields}


def _restore_pre_tokenizer(tokenizer: Any, metadata: dict[str, Any]) -> None:
    """Split text as the vocabulary was trained on it, where the conversion fell back to the plain byte-level split."""
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    name = metadata.get("pre")
    if name is None or not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        return
    if name in _DIGIT_SPLITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif name not in _PLAIN_SPLITS:
        logger.warning("gguf_pre_tokenizer_unknown name=%s risk=%r", name, "token boundaries may differ from training")


def _end_of_turn_ids(metadata: dict[str, Any]) -> list[int]:
    """Every token after which a chat model has said its piece, the end of the sequence first."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    return list(dict.fromkeys(int(metadata[name]) for name in names if name in metadata))


def main() -> None:
    """Convert the file given into the directory given; a reason for not doing so goes to standard output."""
    configure_logging("convert")
    exit_with_supervisor()
    try:
        _convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except GgufConversionError as error:
        sys.stdout.write(str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
