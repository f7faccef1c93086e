"""Files opened by name: what a request may reach, and what reading gives."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from kvtrio.model.errors import ModelFileError
from kvtrio.model.paths import OpenPath, open_inside, open_path

SECRET = "SECRET-BYTES"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of adapters with a secret beside it."""
    (tmp_path / "secret").write_text(SECRET, encoding="utf-8")
    root = tmp_path / "adapters"
    (root / "team" / "one").mkdir(parents=True)
    (root / "a.gguf").write_bytes(b"aaaa")
    (root / "team" / "b.gguf").write_bytes(b"bbbb")
    (root / "team" / "one" / "config").write_bytes(b"cccc")
    return root


def content(opened: OpenPath) -> bytes:
    with opened:
        return bytes(opened.read(100))


def test_names_below_the_root_are_found(root):
    """Files at any depth, and folders with what is in them."""
    assert content(open_inside(root, "a.gguf")) == b"aaaa"
    assert content(open_inside(root, "team/b.gguf")) == b"bbbb"
    with open_inside(root, "team/one") as folder:
        assert folder.is_folder
        assert folder.has("config")
        assert not folder.has("other")
        assert content(folder.child("config")) == b"cccc"


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../secret",
        "team/../../secret",
        "team/../a.gguf",
        "./a.gguf",
        "team//b.gguf",
        "a.gguf/",
        "/etc/passwd",
        "//etc/passwd",
        "a\0.gguf",
        "../secret\0.gguf",
        "x" * 2000,
        "x" * 300,
        "\udcff",
        "absent",
        "a.gguf/b",
        "team/absent/b",
        "~/x",
        "..\\secret",
        "%2e%2e/secret",
    ],
)
def test_other_names_are_refused_without_an_echo(root, name):
    """Nothing outside is reached, and the message holds nothing of the name."""
    with pytest.raises(ModelFileError) as caught:
        open_inside(root, name)
    message = str(caught.value)
    assert message.isascii()
    for part in ("secret", "passwd", "gguf", "absent", "xxx", "team"):
        assert part not in message


def test_absolute_paths_below_the_root_are_refused_too(root):
    """A name is relative, whatever it would lead to."""
    with pytest.raises(ModelFileError):
        open_inside(root, str(root / "a.gguf"))


@pytest.mark.parametrize("target", ["../secret", "a.gguf", "/etc/passwd", "absent", "link"])
def test_links_are_not_followed(root, target):
    """Neither as the last part, nor inside an opened folder, even to a file that is allowed."""
    (root / "link").symlink_to(target)
    (root / "team" / "one" / "link").symlink_to(target)
    with pytest.raises(ModelFileError, match="a link"):
        open_inside(root, "link")
    with open_inside(root, "team/one") as folder:
        assert folder.has("link")
        with pytest.raises(ModelFileError, match="a link"):
            folder.child("link")


@pytest.mark.parametrize("target", ["..", "team", "/"])
def test_links_on_the_way_are_not_followed(root, target):
    """A linked folder is no way in."""
    (root / "way").symlink_to(target)
    for name in ("way", "way/secret", "way/b.gguf", "way/etc/passwd"):
        with pytest.raises(ModelFileError, match="a link"):
            open_inside(root, name)


def test_the_root_itself_may_be_a_link(root, tmp_path):
    """The operator chose it."""
    (tmp_path / "alias").symlink_to(root)
    assert content(open_inside(tmp_path / "alias", "a.gguf")) == b"aaaa"
    with pytest.raises(ModelFileError, match="folder for adapters cannot be opened"):
        open_inside(tmp_path / "secret", "a.gguf")


def test_what_was_opened_is_what_is_read(root):
    """Replacing the name by a link after opening changes nothing."""
    opened = open_inside(root, "a.gguf")
    (root / "a.gguf").unlink()
    (root / "a.gguf").symlink_to("../secret")
    assert content(opened) == b"aaaa"
    with open_inside(root, "team/one") as folder:
        (root / "team" / "one").rename(root / "moved")
        (root / "team" / "one").symlink_to("../..")
        assert content(folder.child("config")) == b"cccc"


def test_a_copy_does_not_change_with_the_file(root):
    """Whoever truncates or rewrites the file later changes neither values nor the process."""
    with open_path(root / "a.gguf") as file:
        data = file.read(100)
    (root / "a.gguf").write_bytes(b"")
    assert bytes(data) == b"aaaa"


def test_a_path_of_the_operator_may_be_a_link(root):
    """Model stores are full of links; what the operator names is opened as it is."""
    (root / "link").symlink_to("team")
    (root / "team" / "c").symlink_to("../a.gguf")
    with open_path(root / "link") as folder:
        assert content(folder.child("c")) == b"aaaa"
    assert content(open_path(root / "link" / "c")) == b"aaaa"


@pytest.mark.parametrize(
    ("name", "message"),
    [("", "not a regular file"), ("empty", "empty"), ("a.gguf", "larger than 3 bytes")],
)
def test_only_files_of_a_fitting_size_are_read(root, name, message):
    """Folders, empty files and oversized ones are refused with the file's label."""
    (root / "empty").touch()
    with pytest.raises(ModelFileError, match=message) as caught, open_path(root / name) as file:
        file.read(3)
    assert str(caught.value).startswith(name or "adapters")


def test_descriptors_are_closed(root):
    """Success and failure leave no descriptor behind."""

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("no list of descriptors here")
    before = count()
    for name in ("a.gguf", "team/b.gguf", "team/one", "team/absent", "a.gguf/x", "absent", ".."):
        with suppress(ModelFileError):
            open_inside(root, name).close()
    opened = open_path(root / "a.gguf")
    opened.close()
    opened.close()
    assert count() == before
