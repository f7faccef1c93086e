"""LoRA adapters as data, from either form in which they are published.

Both forms of one adapter give the same arrays and the same digest. The digest covers exactly what
enters a computation: names, ranks, factors and values as float32, in the order of names. Neither a
file name nor an alias nor the invocation tokens are part of it, so equal weights
compute equal state, and changed bytes under an old name are another adapter.
"""

import struct
from collections.abc import Iterator, Mapping
from enum import Enum
from hashlib import blake2b
from pathlib import Path

from attrs import evolve, frozen

from kvtrio.model.adapter_gguf import read_gguf_adapter
from kvtrio.model.adapter_pairs import Content, LowRank, adaptable
from kvtrio.model.adapter_peft import read_peft_adapter
from kvtrio.model.errors import ModelFileError
from kvtrio.model.fused import cut_rows
from kvtrio.model.gguf_file import parse_gguf
from kvtrio.model.paths import OpenPath, open_path
from kvtrio.model.spec import ModelSpec

__all__ = ["AdapterData", "AdapterKind", "LowRank", "load_adapter"]

DIGEST_BYTES = 32
MAX_FILE_BYTES = 1 << 32
MAX_INVOCATION = 256
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


class AdapterKind(Enum):
    """The form in which an adapter was stored."""

    GGUF = "gguf"
    PEFT = "peft"


@frozen(kw_only=True, eq=False)
class AdapterData:
    """A checked adapter for one base model; two are the same when their digests are."""

    kind: AdapterKind
    digest: bytes
    """32 bytes over the loaded content; see the module."""
    targets: Mapping[str, LowRank]
    """By base tensor name, ``blk.0.attn_q.weight`` for example; sorted. ``output.weight`` is the
    head even where the base shares the embedding's matrix with it."""
    invocation_tokens: tuple[int, ...]
    """Empty, or the adapter is an activated one: it applies from the last occurrence of these."""
    task_name: str
    prompt_prefix: str

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return sum(target.num_bytes for target in self.targets.values())


def load_adapter(source: Path | OpenPath, spec: ModelSpec) -> AdapterData:
    """Read a GGUF adapter, or a PEFT folder, for the base model ``spec``.

    Takes ``source`` over and closes it; ``kvtrio.model.paths.open_inside`` makes one from a
    request's name. Raises ModelFileError with one line that names what is wrong or unsupported:
    every tensor of the adapter is used, or nothing is loaded.
    """
    with source if isinstance(source, OpenPath) else open_path(source) as opened:
        is_folder = opened.is_folder
        content = (
            read_peft_adapter(opened, spec, MAX_FILE_BYTES) if is_folder else _gguf(opened, spec)
        )
        _check_invocation(content.invocation_tokens, spec.vocab_size)
    targets = _cut(content.targets, spec)
    return AdapterData(
        kind=AdapterKind.PEFT if is_folder else AdapterKind.GGUF,
        digest=_digest(targets),
        targets=targets,
        invocation_tokens=content.invocation_tokens,
        task_name=content.task_name,
        prompt_prefix=content.prompt_prefix,
    )


def _gguf(source: OpenPath, spec: ModelSpec) -> Content:
    data = source.read(MAX_FILE_BYTES)
    if data[:4].startswith(_PICKLE_STARTS):
        raise ModelFileError("a pickle, which can run code; GGUF files and PEFT folders are read")
    with parse_gguf(data, Path(source.label)) as file:
        return read_gguf_adapter(file, spec)


def _check_invocation(tokens: tuple[int, ...], vocab_size: int) -> None:
    if len(tokens) > MAX_INVOCATION or not all(0 <= token < vocab_size for token in tokens):
        raise ModelFileError("its invocation tokens are too many or outside the vocabulary")


def _cut(targets: Mapping[str, LowRank], spec: ModelSpec) -> dict[str, LowRank]:
    """Changes of fused matrices as changes of their parts, which share their A."""
    shapes, found = adaptable(spec), dict[str, LowRank]()
    for name, target in targets.items():
        for part, rows in cut_rows(spec, shapes, name).items():
            if part in found:
                raise ModelFileError(f"tensor {part}: it is changed twice")
            found[part] = evolve(target, b=target.b[rows])
    return dict(sorted(found.items()))


def _digest(targets: Mapping[str, LowRank]) -> bytes:
    hasher = blake2b(digest_size=DIGEST_BYTES, person=b"adapter")
    for name, target in sorted(targets.items()):
        for part in _parts(name, target):
            hasher.update(struct.pack("<Q", part.nbytes))
            hasher.update(part)
    return hasher.digest()


def _parts(name: str, target: LowRank) -> Iterator[memoryview]:
    """The shapes follow from name, rank and lengths."""
    yield memoryview(name.encode())
    yield memoryview(struct.pack("<Qf", len(target.a), target.scaling))
    yield target.a.astype("<f4", copy=False).data
    yield target.b.astype("<f4", copy=False).data
