"""What `import multimodal` gives, and what it costs."""

import subprocess
import sys

import multimodal


def test_every_name_of_the_public_face_is_there():
    assert [name for name in multimodal.__all__ if not hasattr(multimodal, name)] == []
    assert sorted(multimodal.__all__) == sorted(multimodal._HOMES)


def test_the_import_loads_nothing_large_and_pictures_no_torch():
    program = (
        "import sys, multimodal; print({'PIL', 'transformers', 'numpy', 'torch'} & sys.modules.keys());"
        "multimodal.Pictures, multimodal.MediaLoader; print({'transformers', 'torch'} & sys.modules.keys());"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert run.stdout.decode().split("\n")[:2] == ["set()", "set()"]
