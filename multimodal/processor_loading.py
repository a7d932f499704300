"""A model's own processor from `transformers`, loaded where neither torch nor torchvision can be had.

Image processors come in two makes; the one that needs Pillow and numpy alone is always taken, so that every process
makes the same inputs. Video processors need torchvision, and a processor of a family with videos cannot be built
without one: here something stands in its place, which no picture ever meets.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import ProcessorMixin

# Where a checkpoint may name its processor's class, in the order transformers looks.
_FILES_WITH_CLASS = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json", "config.json")
_FILES_OF_PICTURE_MODELS = ("processor_config.json", "preprocessor_config.json")


class ProcessorLoadError(Exception):
    """The model takes pictures, but not through this build of its processor. The message says why."""


def load_transformers_processor(model_dir: Path) -> ProcessorMixin | None:
    """Build the processor of a local transformers directory; None if its model takes no pictures.

    It is the real class with the real tokenizer and an image processor that makes numpy arrays
    (`return_tensors="np"`); only videos it cannot process.

    Raises:
        ProcessorLoadError: there is one, but it cannot be built.
    """
    if not any((model_dir / name).is_file() for name in _FILES_OF_PICTURE_MODELS):
        return None
    try:
        class_name = _class_name(model_dir)
        if class_name is None:
            return None
        real_class = _real_class(class_name)
        parts = real_class.get_attributes()
        if "image_processor" not in parts or "tokenizer" not in parts:
            return None
        # The check of the parts' classes would refuse whatever stands for the video processor.
        processor_class: Any = type(
            real_class.__name__, (real_class,), {"check_argument_for_proper_class": lambda *_: None}
        )
        values, _ = processor_class.get_processor_dict(model_dir, local_files_only=True)
        return processor_class.from_args_and_dict([_part(name, model_dir) for name in parts], values)
    except ProcessorLoadError:
        raise
    except Exception as error:  # whatever a file of the wrong shape makes of transformers
        raise ProcessorLoadError(f"no picture processor could be built from {model_dir}: {error}") from error


def _class_name(model_dir: Path) -> str | None:
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    described: dict[str, Any] = {}
    for name in _FILES_WITH_CLASS:
        path = model_dir / name
        described = json.loads(path.read_bytes()) if path.is_file() else {}
        if found := described.get("processor_class"):
            return found
    known = PROCESSOR_MAPPING_NAMES.get(described.get("model_type"))
    return known[0] if isinstance(known, tuple) else known


def _part(name: str, model_dir: Path) -> Any:
    from transformers import AutoImageProcessor, AutoTokenizer

    match name:
        case "image_processor":
            return AutoImageProcessor.from_pretrained(model_dir, backend="pil", local_files_only=True)
        case "tokenizer":
            return AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        case "video_processor":
            return _NoVideos()
    raise ProcessorLoadError(f"the processor in {model_dir} needs a part that is not supported: {name}")


class _NoVideos(dict[str, Any]):
    """A dictionary, since processors print themselves as JSON, parts included."""

    model_input_names: tuple[str, ...] = ()


def _real_class(name: str) -> type[ProcessorMixin]:
    import transformers

    found = getattr(transformers, name, None)
    if found is None:
        raise ProcessorLoadError(f"transformers {transformers.__version__} has no {name}")
    if not getattr(found, "is_dummy", False):
        return found
    # transformers hides a class whose module imports torchvision, for a helper that the other make has as well.
    with _pil_in_the_place_of_torchvision(found.__module__):
        return getattr(importlib.import_module(found.__module__), name)


@contextlib.contextmanager
def _pil_in_the_place_of_torchvision(processing_module: str) -> Iterator[None]:
    """Meanwhile the family's torchvision image processors are found to be its Pillow ones."""
    package, _, module = processing_module.rpartition(".")
    family = module.removeprefix("processing_")
    hidden = f"{package}.image_processing_{family}"
    stands_in = importlib.import_module(f"{package}.image_processing_pil_{family}")
    if hidden in sys.modules:
        yield
        return
    sys.modules[hidden] = stands_in
    try:
        yield
    finally:
        del sys.modules[hidden]
