"""`file:` URLs: regular files below one folder, however the path is spelled."""

from __future__ import annotations

import os

import pytest

from multimodal.errors import MediaError
from multimodal.local_file import _read, read_local_file

CONTENT = b"a picture"


@pytest.fixture
def root(tmp_path):
    folder = (tmp_path / "open").resolve()
    (folder / "deep").mkdir(parents=True)
    (folder / "a b.png").write_bytes(CONTENT)
    (folder / "deep" / "c.png").write_bytes(CONTENT)
    (tmp_path / "secret").write_bytes(b"a secret")
    (tmp_path / "open-but-not").mkdir()
    (tmp_path / "open-but-not" / "secret").write_bytes(b"a secret")
    return folder


@pytest.mark.parametrize(
    "path", ["/a%20b.png", "/a b.png", "/deep/c.png", "/deep/../a%20b.png", "//deep//c.png", "/deep/%2e%2e/a b.png"]
)
@pytest.mark.parametrize("host", ["", "localhost"])
def test_files_below_the_folder_are_read(root, path, host):
    assert read_local_file(f"file://{host}{root}{path}", root, 100) == CONTENT


def test_a_link_within_the_folder_counts_as_what_it_points_to(root):
    (root / "link.png").symlink_to(root / "deep" / "c.png")
    assert read_local_file(f"file://{root}/link.png", root, 100) == CONTENT


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/no/such/file",
        "{root}/../secret",
        "{root}/%2e%2e/secret",
        "{root}/deep/../../secret",
        "{root}-but-not/secret",
        "{root}/to-secret",
        "{root}/to-outside/secret",
        "{root}",
        "{root}/",
        "{root}/deep/..",
        "/",
    ],
)
def test_whatever_lies_outside_gets_one_answer(root, path):
    (root / "to-secret").symlink_to(root.parent / "secret")
    (root / "to-outside").symlink_to(root.parent)
    with pytest.raises(MediaError, match="from below the folder its operator allows"):
        read_local_file("file://" + path.format(root=root), root, 100)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file://{root}/missing", "no such file"),
        ("file://{root}/deep", "no regular file"),
        ("file://{root}/pipe", "no regular file"),
        ("file://{root}/a b.png/x", "operator allows"),
        ("file://otherhost{root}/a b.png", "no host"),
        ("file:relative.png", "absolute"),
        ("file://{root}/a%00b", "cannot be read"),
        ("file://{root}/%ff", "cannot be read"),
        ("file://{root}/loop", "cannot be read|operator allows|cannot be opened"),
        ("file://{root}/" + "x" * 5000, "cannot be"),
    ],
)
def test_the_reason_is_told(root, url, reason):
    os.mkfifo(root / "pipe")
    (root / "loop").symlink_to(root / "loop")
    with pytest.raises(MediaError, match=reason) as refused:
        read_local_file(url.format(root=root), root, 100)
    assert str(root) not in str(refused.value)


def test_the_limit_is_exact(root):
    url = f"file://{root}/deep/c.png"
    assert read_local_file(url, root, len(CONTENT)) == CONTENT
    with pytest.raises(MediaError, match=r"has 9 bytes, more than 8"):
        read_local_file(url, root, len(CONTENT) - 1)


def test_without_a_folder_there_are_no_files():
    with pytest.raises(MediaError, match="loads no file: URLs"):
        read_local_file("file:///etc/passwd", None, 100)


@pytest.mark.parametrize("swapped", ["deep", "deep/c.png"])
def test_a_link_that_takes_the_place_of_what_was_checked_is_not_followed(root, swapped):
    place = root / swapped
    place.rename(root / "moved")
    place.symlink_to(root.parent / "secret" if place.suffix else root.parent / "open-but-not")
    name = "secret" if swapped == "deep" else "c.png"
    with pytest.raises(MediaError, match="operator allows"):
        _read(root, (root / "deep" / name).relative_to(root), 100)
