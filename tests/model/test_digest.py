"""Digests of contents."""

import pytest

from kvtrio.model.digest import content_digest
from kvtrio.model.errors import ModelFileError


def test_a_digest_knows_contents_and_order_not_names(tmp_path):
    """Equal bytes are equal under any name; a byte, or the order of parts, makes a difference."""
    one, two, copy = (tmp_path / name for name in ("one", "two", "copy"))
    one.write_bytes(b"a" * 1000)
    two.write_bytes(b"b" * 1000)
    copy.write_bytes(one.read_bytes())
    assert content_digest([one, two]) == content_digest([copy, two])
    assert content_digest([one, two]) != content_digest([two, one])
    copy.write_bytes(b"a" * 999 + b"c")
    assert content_digest([one]) != content_digest([copy])
    assert len(content_digest([one])) == 32


def test_a_missing_file_is_one_line(tmp_path):
    """No traceback of the library's."""
    with pytest.raises(ModelFileError):
        content_digest([tmp_path / "none"])
