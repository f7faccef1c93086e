"""``kernels/cpu/kvt_single.h`` for ctypes: single operations, for tests and measurements."""

from ctypes import CDLL, POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p

from kvtrio.kernels.cpu_abi import (
    Attention,
    Cache,
    Chunk,
    LowRank,
    Matrix,
    Recurrent,
    Rope,
    Routing,
    Signatures,
    State,
    Step,
    Vector,
    sign,
)


class ExpertsCall(Structure):
    """``kvt_experts_call``."""

    _fields_ = (
        ("stacks", POINTER(Matrix)),
        ("biases", c_void_p * 3),
        ("selection_bias", c_void_p),
        ("routing", Routing),
        ("num_used", c_int32),
        ("activation", c_int32),
    )


FUNCTIONS: Signatures = {
    "kvt_rms_norm": (c_int32, (c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p)),
    "kvt_rope_angles": (
        c_int32,
        (POINTER(Rope), c_void_p, c_void_p, c_int64, c_void_p, c_void_p),
    ),
    "kvt_rope_rotate": (
        c_int32,
        (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int32, c_int32),
    ),
    "kvt_gated": (c_int32, (c_void_p, c_void_p, c_int64, c_int32, c_void_p)),
    "kvt_softcap": (c_int32, (c_void_p, c_int64, c_float)),
    "kvt_dequantise_row": (c_int32, (POINTER(Matrix), c_int64, c_void_p)),
    "kvt_multiply": (
        c_int32,
        (
            c_void_p, POINTER(Matrix), POINTER(Matrix), c_int32, c_void_p, c_void_p, c_int64,
            c_int32, c_void_p,
        ),
    ),
    "kvt_multiply_many": (
        c_int32,
        (c_void_p, POINTER(Matrix), c_int32, c_void_p, c_int64, POINTER(c_void_p)),
    ),
    "kvt_experts": (
        c_int32,
        (c_void_p, POINTER(ExpertsCall), c_void_p, c_void_p, c_int64, c_void_p, c_void_p),
    ),
    "kvt_cache_write": (c_int32, (POINTER(Cache), c_int64, c_int32, c_void_p, c_void_p)),
    "kvt_cache_copy": (c_int32, (POINTER(Cache), c_int64, c_int64, c_int32)),
    "kvt_attend": (
        c_int32,
        (
            c_void_p, POINTER(Cache), POINTER(Attention), c_void_p, c_void_p, c_int32, c_void_p,
            c_void_p, c_void_p, c_void_p,
        ),
    ),
    "kvt_mix": (
        c_int32,
        (
            c_void_p, POINTER(Recurrent), POINTER(Vector), c_int32, POINTER(State), c_float,
            POINTER(Chunk), c_void_p, c_int32, c_void_p, c_void_p,
        ),
    ),
    "kvt_low_rank_add": (
        c_int32,
        (
            c_void_p, POINTER(LowRank), c_void_p, c_int32, c_void_p, c_int64, c_int64, c_int64,
            c_void_p,
        ),
    ),
    "kvt_sample_rows": (c_int32, (c_void_p, c_void_p, c_int64, POINTER(Step))),
    "kvt_barrier_nanoseconds": (c_double, (c_void_p,)),
}  # fmt: skip


def declare(cdll: CDLL) -> None:
    """Give the functions their signatures. Raises AbiMismatch."""
    sign(cdll, FUNCTIONS)
