"""Quantised matrices as the Triton kernels read them: codes, and scales apart from them.

A GGUF block has its scales between its codes, at odd addresses. Here each kind of field has an
array of its own, with rows one behind the other, so that it can be read in whole words. Nothing is
rounded: what a matrix stands for stays the same to the bit.

Codes of a row, by groups of 32: byte 16 g + b has in its low half element 32 g + b and in its high
half element 32 g + 16 + b. Bits above the fourth follow in ``high``, in the order of those bytes:
two bits for each byte with 5-bit codes, four with 6-bit ones. Codes of 8 bits are bytes in order.

A value is ``d * scale * (code - zero) + m * min``; fields that a type lacks are left out.
Source of the blocks' layout: ggml-quants.c and ggml-common.h of llama.cpp.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kind:
    """How codes of a type become values."""

    bits: int
    zero: int
    block: int
    """Elements that share one d."""
    block_bytes: int
    group: int = 0
    """Elements that share a scale and a min inside the block; 0: there are none."""
    has_min: bool = False
    is_exponent: bool = False
    """d is an exponent, and codes are E2M1 numbers."""


KINDS = {
    "Q4_0": Kind(4, 8, 32, 18),
    "Q4_1": Kind(4, 0, 32, 20, has_min=True),
    "Q5_0": Kind(5, 16, 32, 22),
    "Q5_1": Kind(5, 0, 32, 24, has_min=True),
    "Q8_0": Kind(8, 128, 32, 34),
    "Q4_K": Kind(4, 0, 256, 144, group=32, has_min=True),
    "Q5_K": Kind(5, 0, 256, 176, group=32, has_min=True),
    "Q6_K": Kind(6, 32, 256, 210, group=16),
    "MXFP4": Kind(4, 0, 32, 17, is_exponent=True),
}


@dataclass(frozen=True, eq=False)
class Packed:
    """A matrix [rows, cols]; every array is contiguous, on one device."""

    kind: Kind
    rows: int
    cols: int
    low: Tensor
    """uint8 [rows, cols / 2], of 8-bit codes [rows, cols]."""
    high: Tensor | None
    """uint8 [rows, cols / 8] or [rows, cols / 4]."""
    d: Tensor
    """float16 [rows, cols / block], or uint8 exponents."""
    m: Tensor | None
    """float16 [rows, cols / block]."""
    scales: Tensor | None
    """int8 [rows, cols / group]."""
    mins: Tensor | None
    """int8 [rows, cols / group]."""

    @property
    def num_bytes(self) -> int:
        fields = (self.low, self.high, self.d, self.m, self.scales, self.mins)
        return sum(each.numel() * each.itemsize for each in fields if each is not None)


def packed_bytes(name: str, rows: int, cols: int) -> int:
    """What ``pack`` will take, in bytes; nothing is allocated."""
    kind = KINDS[name]
    fields = kind.bits * cols // 8 + (1 if kind.is_exponent else 2) * (cols // kind.block)
    fields += 2 * (cols // kind.block) * kind.has_min
    fields += (cols // kind.group) * (1 + kind.has_min) if kind.group else 0
    return rows * fields


def pack(name: str, raw: Tensor, cols: int) -> Packed:
    """``raw`` uint8 [rows, row bytes], as in the file, on any device. Raises KeyError for a type
    that is none of ``KINDS``."""
    kind = KINDS[name]
    rows = raw.shape[0]
    blocks = raw.view(rows, cols // kind.block, kind.block_bytes)
    d_at, m_at = _places(name)
    codes = _codes(name, kind, blocks).reshape(rows, cols)
    low, high = _split(codes, kind.bits)
    scales, mins = _scales(name, blocks)
    return Packed(
        kind=kind,
        rows=rows,
        cols=cols,
        low=low,
        high=high,
        d=blocks[:, :, 0].contiguous() if kind.is_exponent else _halves(blocks, d_at),
        m=_halves(blocks, m_at, -1.0 if kind.group else 1.0) if kind.has_min else None,
        scales=None if scales is None else scales.reshape(rows, -1).contiguous(),
        mins=None if mins is None else mins.reshape(rows, -1).contiguous(),
    )


def _places(name: str) -> tuple[int, int]:
    """Where a block has its d and its m."""
    return (208, 0) if name == "Q6_K" else (0, 2)


def _halves(blocks: Tensor, place: int, sign: float = 1.0) -> Tensor:
    """Mins of K types are subtracted: ``sign`` makes all of them summands."""
    parts = blocks[:, :, place : place + 2].contiguous().view(torch.float16)[:, :, 0]
    return (parts * sign).contiguous()


def _codes(name: str, kind: Kind, blocks: Tensor) -> Tensor:
    """uint8 [rows, blocks, block elements]."""
    if name == "Q8_0":
        return blocks[:, :, 2:] ^ 128
    if name == "Q6_K":
        return _codes_6(blocks)
    if kind.block == 256:
        quants = _nibbles(_parts(blocks[:, :, -128:], 4, 32))
        if kind.bits == 5:
            shifts = torch.arange(8, device=blocks.device, dtype=torch.uint8)
            bits = blocks[:, :, 16:48].unsqueeze(-2) >> shifts[:, None] & 1
            quants = quants | bits.flatten(-2) << 4
        return quants
    quants = _nibbles(blocks[:, :, -16:].unsqueeze(-2))
    if kind.bits == 5:
        quants = quants | _fifth_bits(blocks[:, :, -20:-16]) << 4
    return quants


def _parts(x: Tensor, *sizes: int) -> Tensor:
    """The last axis as several."""
    return x.reshape(*x.shape[:-1], *sizes)


def _nibbles(parts: Tensor) -> Tensor:
    """[..., parts, n] to [..., 2 n parts]: of each part the low halves and then the high ones."""
    return torch.stack((parts & 15, parts >> 4), -2).flatten(-3)


def _fifth_bits(words: Tensor) -> Tensor:
    """The 32 bits of four bytes, lowest first: [..., 4] to [..., 32]."""
    shifts = torch.arange(8, device=words.device, dtype=torch.uint8)
    return (words.unsqueeze(-1) >> shifts & 1).flatten(-2)


def _codes_6(blocks: Tensor) -> Tensor:
    """Of each 128 elements 64 bytes hold the low four bits, by quarters, and 32 the high two."""
    low = _parts(blocks[:, :, :128], 2, 2, 32)
    low = torch.stack((low & 15, low >> 4), -3).flatten(-3, -2)
    shifts = torch.arange(0, 8, 2, device=blocks.device, dtype=torch.uint8)
    high = _parts(blocks[:, :, 128:192], 2, 1, 32) >> shifts[:, None] & 3
    return (low | high << 4).flatten(-3)


def _split(codes: Tensor, bits: int) -> tuple[Tensor, Tensor | None]:
    """``low`` and ``high`` of ``Packed``."""
    if bits == 8:
        return codes.contiguous(), None
    first, second = _parts(codes, -1, 2, 16).unbind(-2)
    low = (first & 15 | (second & 15) << 4).flatten(-2).contiguous()
    if bits == 4:
        return low, None
    width = bits - 4
    pairs = (first >> 4 | second >> 4 << width).flatten(-2)
    per_byte = 4 // width
    members = _parts(pairs, -1, per_byte).unbind(-1)
    high = members[0]
    for i, member in enumerate(members[1:], 1):
        high = high | member << (2 * width * i)
    return low, high.contiguous()


def _scales(name: str, blocks: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """int8 [rows, blocks, groups], scales and mins."""
    if name == "Q6_K":
        return blocks[:, :, 192:208].contiguous().view(torch.int8), None
    if name not in ("Q4_K", "Q5_K"):
        return None, None
    # Six bits each: the low ones of 0..3 are bytes of their own, those of 4..7 share one, and
    # have their top bits above those of 0..3.
    first, second, third = _parts(blocks[:, :, 4:16], 3, 4).unbind(-2)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    mins = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    return scales.view(torch.int8), mins.view(torch.int8)
