"""Rotary position embeddings from metadata: which pairs, how fast, and for which context."""

import math

import numpy as np

from kvtrio.model.errors import ModelFileError, safe_name
from kvtrio.model.fields import Fields
from kvtrio.model.model_file import ModelFile
from kvtrio.model.source import MAX_CONTEXT, Source
from kvtrio.model.spec import LongFactors, RopeSpec, RopeStyle

BASE = (1.0, 1e12)
FACTOR = (1e-3, 1e6)
MAGNITUDE = (1e-3, 1e3)
FACTORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
BETAS = (32.0, 1.0)
"""Turns in the original context: from so many on a pair stays, from so few on it is stretched."""
YARN = "rope.scaling.yarn"
UNROUNDED = "rope.scaling.yarn_unrounded"
"""Ours: between whole pairs, too, which only the configurations of training libraries ask for."""


def read_rope(source: Source, most: int, *, is_sliding: bool) -> RopeSpec:
    """Of a layer whose heads have ``most`` values that could be rotated.

    Raises ModelFileError for what is missing, impossible or unsupported.
    """
    fields = source.fields
    num_rotated = fields.integer("rope.dimension_count", most, default=most)
    if num_rotated % 2:
        raise ModelFileError("an odd number of rotated values is not supported")
    base = fields.number("rope.freq_base", BASE, 10000.0)
    style = _style(source)
    if is_sliding and source.family.local_rope:
        # The context extension of the larger sizes applies to the full layers only.
        base = fields.number("rope.freq_base_swa", BASE, 10000.0)
        return RopeSpec(style=style, num_rotated=num_rotated, base=base)
    kind = fields.text("rope.scaling.type", "linear")
    if kind == "yarn":
        return _yarn(source, RopeSpec(style=style, num_rotated=num_rotated, base=base))
    factors, long = _factors(source)
    if kind not in ("none", "linear", "longrope") or (kind == "longrope" and long is None):
        supported = "none, linear, yarn, and longrope with its factors"
        raise ModelFileError(
            f"rope scaling {safe_name(kind)} is not supported; supported are {supported}"
        )
    return RopeSpec(
        style=style,
        num_rotated=num_rotated,
        base=base,
        scale=_linear_scale(fields) if kind == "linear" else 1.0,
        factors=factors,
        long=long,
        magnitude=fields.number("rope.scaling.attn_factor", MAGNITUDE, 1.0),
    )


def log_multiplier(source: Source) -> float:
    """What yarn's logarithm of the factor is multiplied by where scores grow with it, or that
    growth is taken back; or 0."""
    return source.fields.number("rope.scaling.yarn_log_multiplier", (0.0, 10.0), 0.0)


def yarn_factor(source: Source) -> float | None:
    """How many times longer than the original one the context is; None: no yarn."""
    is_yarn = source.fields.text("rope.scaling.type", "linear") == "yarn"
    return source.fields.number("rope.scaling.factor", (1.0, FACTOR[1])) if is_yarn else None


def check_factors(file: ModelFile) -> None:
    """Raise ModelFileError for factors that are no divisors."""
    for name in (FACTORS, LONG, SHORT):
        if name in file.tensors:
            factors = file.dequantise(name)
            if not (np.isfinite(factors).all() and (factors > 0).all()):
                raise ModelFileError(f"tensor {name} holds a factor that is not above zero")


def _style(source: Source) -> RopeStyle:
    # Granite's files use this key, a mere remark elsewhere, as a switch.
    switch = "rope.scaling.finetuned"
    if source.family.granite_scales and not source.fields.flag(switch, default=True):
        return RopeStyle.NONE
    return source.family.rope


def _factors(source: Source) -> tuple[str | None, LongFactors | None]:
    """The tensor of divisors, and another for long contexts."""
    tensors = source.file.tensors
    if source.fields.prefix == "llama." and FACTORS in tensors:
        return FACTORS, None
    if not source.family.longrope or not {LONG, SHORT} & tensors.keys():
        return None, None
    trained = source.fields.integer("context_length", MAX_CONTEXT)
    key = "rope.scaling.original_context_length"
    original = source.fields.integer(key, MAX_CONTEXT, default=trained)
    return SHORT, LongFactors(tensor=LONG, original_context=original)


def _linear_scale(fields: Fields) -> float:
    # Files from 2023 use the second key. Zero means that there is no factor.
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        if fields.has(key) and fields.number(key, (0.0, FACTOR[1])):
            return 1.0 / fields.number(key, FACTOR)
    return 1.0


def _yarn(source: Source, plain: RopeSpec) -> RopeSpec:
    """Divisors from 1 for fast pairs to the factor for slow ones (arXiv 2309.00071).

    Cos and sin grow by 1 + 0.1 ln(factor), except in latent attention, whose scores grow instead.
    """
    fields, factor = source.fields, yarn_factor(source)
    assert factor is not None
    trained = fields.integer("context_length", MAX_CONTEXT)
    original = fields.integer("rope.scaling.original_context_length", MAX_CONTEXT, default=trained)
    betas = [
        fields.number(f"{YARN}_{name}", (1e-3, 1e6), default)
        for name, default in zip(("beta_fast", "beta_slow"), BETAS, strict=True)
    ]
    size = plain.num_rotated
    if plain.base <= 1.0:
        raise ModelFileError("yarn needs a rope.freq_base above 1")
    low, high = (
        size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(plain.base))
        for turns in betas
    )
    if not fields.flag(UNROUNDED, default=False):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(0.0, low), min(size - 1.0, high)
    pairs = np.arange(size // 2)
    ramp = np.clip((pairs - low) / max(0.001, high - low), 0.0, 1.0)
    divisors = 1.0 / (ramp / factor + (1.0 - ramp))
    log = 0.1 * math.log(factor)
    grown = 1.0 if source.family.latent else (1 + log) / (1 + log_multiplier(source) * log)
    own = fields.number("rope.scaling.attn_factor", MAGNITUDE, 1.0)
    return RopeSpec(
        style=plain.style,
        num_rotated=size,
        base=plain.base,
        divisors=tuple(float(divisor) for divisor in divisors),
        magnitude=grown * own,
    )
