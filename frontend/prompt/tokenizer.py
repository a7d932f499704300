"""The model's tokenizer, as a server needs it: loaded once, exact, and out of the event loop's way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from jinja2 import TemplateSyntaxError
from tokenizers import Tokenizer

from .chat_template import ChatTemplate, chat_template_of


class _ProcessorTemplate(msgspec.Struct):
    chat_template: str


class TokenizerLoadError(Exception):
    """The directory holds no tokenizer that can be served. The message says why."""


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """`backend` does the work; `chat_template` is None for models that were not made for chat."""

    backend: Tokenizer
    chat_template: ChatTemplate | None

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens spelled out. Ids that stand for no token are passed over."""
        # Unlike decode(), this one releases the interpreter lock.
        (text,) = self.backend.decode_batch([token_ids], skip_special_tokens=False)
        return text


def load_tokenizer(model_dir: Path, image_token: str | None = None) -> ModelTokenizer:
    """Load tokenizer and chat template of a local transformers directory. `image_token` is the model's, if it has one.

    transformers reads the files, since they come in many historical shapes; what it builds is a `tokenizers`
    object, which is then used directly. No torch is loaded that the process has not loaded already or blocked.

    Raises:
        TokenizerLoadError: nothing there that can be read, or only a tokenizer written in Python.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise TokenizerLoadError(f"no tokenizer could be loaded from {model_dir}: {error}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise TokenizerLoadError(
            f"the tokenizer in {model_dir} ({type(tokenizer).__name__}) is not a fast one; add a tokenizer.json"
        )
    backend.no_truncation()
    backend.no_padding()
    try:
        if (of_processor := _template_of_processor(model_dir)) is not None:
            tokenizer.chat_template = of_processor
        chat_template = chat_template_of(tokenizer, image_token=image_token)
    except (TemplateSyntaxError, ValueError) as error:
        raise TokenizerLoadError(f"the chat template in {model_dir} cannot be used: {error}") from error
    return ModelTokenizer(backend, chat_template)


def _template_of_processor(model_dir: Path) -> str | None:
    """Older models with pictures keep their chat template in a file that only processors read. Raises ValueError."""
    file = model_dir / "chat_template.json"
    if not file.is_file() or (model_dir / "chat_template.jinja").is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=_ProcessorTemplate).chat_template
    except msgspec.DecodeError as error:
        raise ValueError(f"{file.name}: {error}") from error
