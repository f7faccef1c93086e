"""``kernels/cpu/kvt.h``, ``kvt_op.h``, ``kvt_step.h`` for ctypes: structures, numbers, signatures.

The headers say what everything means. ``declare`` compares sizes with the library's own, so that a
structure that changed on one side only is found at load and not by what it does to memory.
"""

import ctypes
from collections.abc import Mapping
from ctypes import (
    POINTER,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint32,
    c_void_p,
)
from enum import IntEnum
from typing import Any

NONE = -1
"""Index of no vector, matrix, rope, attention or recurrent layer."""
WANT_LOG_SUM = 1
PROFILE_COLUMNS = 4


class OpKind(IntEnum):
    """KVT_OP_."""

    EMBED = 0
    QKV = 1
    ATTENTION = 2
    LINEAR = 3
    GATED = 4
    ADD = 5
    SAMPLED = 6
    LOGITS = 7
    SAMPLE = 8
    RECURRENT = 9
    EXPERTS = 10
    PLAIN = 11
    LATENT = 12
    HEADS = 13


class Buffer(IntEnum):
    """Activations: KVT_RESIDUAL and the following."""

    RESIDUAL = 0
    QUERY = 1
    ATTENDED = 2
    HIDDEN = 3
    BRANCH = 4


class Activation(IntEnum):
    """KVT_SILU and the following."""

    SILU = 1
    GELU_TANH = 2
    CLAMPED = 3


class Scoring(IntEnum):
    """KVT_SCORE_."""

    CHOSEN = 0
    SOFTMAX = 1
    SIGMOID = 2


class Mixing(IntEnum):
    """Kinds of recurrent layers: KVT_SHORT_CONV and the following."""

    SHORT_CONV = 0
    DELTA_NET = 1
    STATE_SPACE = 2


class RopePairs(IntEnum):
    """KVT_ROPE_."""

    NORM = 0
    NEOX = 1


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Matrix(ctypes.Structure):
    _fields_ = (
        *_fields(c_int64, "rows cols"),
        *_fields(c_void_p, "data"),
        *_fields(c_int64, "bytes"),
        *_fields(c_int32, "type stack"),
    )


class Vector(ctypes.Structure):
    _fields_ = (*_fields(c_void_p, "data"), *_fields(c_int64, "size"))


class Cache(ctypes.Structure):
    _fields_ = (
        *_fields(c_void_p, "keys values"),
        *_fields(c_int64, "num_blocks"),
        *_fields(c_int32, "key_type value_type block_size kv_heads head_dim value_dim"),
        *_fields(c_int32, "group is_latent"),
    )


class Rope(ctypes.Structure):
    _fields_ = (
        *_fields(c_double, "base scale magnitude"),
        *_fields(c_int32, "style num_rotated factors reserved"),
    )


class Attention(ctypes.Structure):
    _fields_ = (
        *_fields(c_int32, "cache rope num_heads window"),
        *_fields(c_float, "scale softcap"),
        *_fields(c_int32, "sinks is_gated has_joint_norms temperature_length"),
        *_fields(c_float, "temperature"),
    )


class State(ctypes.Structure):
    _fields_ = (
        *_fields(c_void_p, "data"),
        *_fields(c_int64, "stride num_slots"),
        *_fields(c_int32, "group reserved"),
    )


class Recurrent(ctypes.Structure):
    _fields_ = (
        *_fields(c_int32, "kind state width channels num_heads num_groups key_dim value_dim"),
        *_fields(c_int32, "is_tiled has_fused_gates conv conv_bias dt_bias decay skip norm"),
    )


class Routing(ctypes.Structure):
    _fields_ = (
        *_fields(c_int32, "scoring is_normalised"),
        *_fields(c_float, "scale"),
        *_fields(c_int32, "bias num_groups num_groups_used"),
    )


class Op(ctypes.Structure):
    _fields_ = (
        *_fields(c_int32, "kind input output norm norm_bias is_centred"),
        *_fields(c_float, "eps"),
        *_fields(c_int32 * 4, "matrices"),
        *_fields(c_int32 * 4, "biases"),
        *_fields(c_int32 * 2, "head_norms"),
        *_fields(c_int32, "attention activation"),
        *_fields(c_float, "scale softcap"),
        *_fields(c_int32, "recurrent num_used is_shared shared_gate"),
        *_fields(Routing, "routing"),
    )


class ModelDesc(ctypes.Structure):
    _fields_ = (
        *_fields(POINTER(Matrix), "matrices"),
        *_fields(POINTER(Vector), "vectors"),
        *_fields(POINTER(Cache), "caches"),
        *_fields(POINTER(Rope), "ropes"),
        *_fields(POINTER(Attention), "attentions"),
        *_fields(POINTER(Op), "program"),
        *_fields(POINTER(State), "states"),
        *_fields(POINTER(Recurrent), "recurrents"),
        *_fields(c_int32, "num_matrices num_vectors num_caches num_ropes num_attentions num_ops"),
        *_fields(c_int32, "num_states num_recurrents"),
        *_fields(c_int32, "num_groups hidden_size vocab_size max_sampled"),
        *_fields(c_int64, "max_rows max_context"),
    )


class LowRank(ctypes.Structure):
    _fields_ = (
        *_fields(c_void_p, "a b"),
        *_fields(c_int32, "matrix rank"),
        *_fields(c_float, "scaling"),
        *_fields(c_int32, "reserved"),
    )


class Chunk(ctypes.Structure):
    _fields_ = (*_fields(c_int64, "start"), *_fields(c_int32, "num_rows is_sampled"))


class Copy(ctypes.Structure):
    _fields_ = _fields(c_int32, "group source target num_tokens")


class Segment(ctypes.Structure):
    _fields_ = _fields(c_int32, "first_chunk num_chunks")


class Use(ctypes.Structure):
    _fields_ = (
        *_fields(c_void_p, "adapter"),
        *_fields(c_float, "scale"),
        *_fields(c_int32, "first_segment num_segments reserved"),
    )


class Sample(ctypes.Structure):
    _fields_ = _fields(c_int32, "num_top wants")


class Step(ctypes.Structure):
    _fields_ = (
        *_fields(c_void_p, "token_ids chunks blocks tables copies uses segments samples"),
        *_fields(c_void_p, "best best_logits log_sums is_finite top_ids top_logits profile"),
        *_fields(c_int32, "num_chunks num_copies num_uses num_segments num_rows num_sampled"),
        *_fields(c_int32, "top_stride num_blocks"),
    )


STRUCTURES = (
    Matrix, Vector, Cache, Rope, Attention, Op, ModelDesc, LowRank, Chunk, Copy, Segment, Use,
    Sample, Step, State, Recurrent,
)  # fmt: skip
"""In the order of KVT_STRUCT_."""

Signatures = Mapping[str, tuple[Any, tuple[Any, ...]]]
"""Result and arguments by name."""

FUNCTIONS: Signatures = {
    "kvt_abi_version": (c_int32, ()),
    "kvt_isa": (c_char_p, ()),
    "kvt_digest": (c_char_p, ()),
    "kvt_features": (c_uint32, ()),
    "kvt_error_text": (c_char_p, ()),
    "kvt_struct_bytes": (c_int64, (c_int32,)),
    "kvt_team_new": (c_int32, (c_int32, POINTER(c_void_p))),
    "kvt_team_free": (None, (c_void_p,)),
    "kvt_team_wake": (None, (c_void_p,)),
    "kvt_alloc": (c_void_p, (c_int64,)),
    "kvt_free": (None, (c_void_p, c_int64)),
    "kvt_packed_bytes": (c_int64, (c_int32, c_int64, c_int64)),
    "kvt_pack": (c_int32, (c_void_p, c_int32, c_void_p, c_int64, c_int64, c_void_p)),
    "kvt_key_block_bytes": (c_int64, (POINTER(Cache),)),
    "kvt_value_block_bytes": (c_int64, (POINTER(Cache),)),
    "kvt_state_values": (c_int64, (POINTER(Recurrent),)),
    "kvt_model_new": (c_int32, (c_void_p, POINTER(ModelDesc), POINTER(c_void_p))),
    "kvt_model_free": (None, (c_void_p,)),
    "kvt_model_logits": (c_void_p, (c_void_p,)),
    "kvt_model_buffer_bytes": (c_int64, (c_void_p,)),
    "kvt_adapter_new": (c_int32, (c_void_p, POINTER(LowRank), c_int32, POINTER(c_void_p))),
    "kvt_adapter_free": (None, (c_void_p,)),
    "kvt_adapter_bytes": (c_int64, (c_void_p,)),
    "kvt_step_run": (c_int32, (c_void_p, POINTER(Step))),
}


class AbiMismatch(RuntimeError):
    """The library was built from another header than this module describes."""


def declare(cdll: ctypes.CDLL) -> None:
    """Give the functions of these headers their signatures. Raises AbiMismatch."""
    sign(cdll, FUNCTIONS)
    for i, structure in enumerate(STRUCTURES):
        if cdll.kvt_struct_bytes(i) != ctypes.sizeof(structure):
            raise AbiMismatch(f"its {structure.__name__} has another size")


def sign(cdll: ctypes.CDLL, signatures: Signatures) -> None:
    """Raises AbiMismatch for a function that is not there."""
    for name, (result, arguments) in signatures.items():
        function = getattr(cdll, name, None)
        if function is None:
            raise AbiMismatch(f"it has no {name}")
        function.restype, function.argtypes = result, arguments


def check(cdll: ctypes.CDLL, result: int) -> int:
    """``result`` of a call, if it is not an error.

    Raises MemoryError where there is none, else RuntimeError: a bug of the caller.
    """
    if result >= 0:
        return result
    text = cdll.kvt_error_text().decode("ascii", "replace")
    raise MemoryError(text) if result == -2 else RuntimeError(f"kernel error {result}: {text}")
