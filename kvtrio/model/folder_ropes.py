"""Rope scaling of config.json: as keys of a GGUF file's metadata, and as tensors of divisors.

Formulas as in ``transformers`` (modeling_rope_utils.py).
"""

import math

import numpy as np

from kvtrio.model.errors import ModelFileError, safe_name
from kvtrio.model.folder_config import (
    Config,
    FolderModel,
    Values,
    attending,
    rope_kind,
    rope_of,
)

FACTORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
MOST_FACTOR = 1e30
MAX_PAIRS = 4096
_WITH_FACTORS = ("llama", "mistral", "mixtral")
ORIGINAL = "original_max_position_embeddings"


def common(config: Config) -> Values:
    """What most kinds have. Raises ModelFileError."""
    values = attending(config)
    head_dim = values["attention.key_length"]
    assert isinstance(head_dim, int)
    return values | rope_values(config, head_dim)


def rope_values(config: Config, head_dim: int, *, share: float = 1.0, grows: bool = True) -> Values:
    """``share``: of a head that is rotated, where nothing else is said; ``grows``: see below."""
    rope = rope_of(config)
    base = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    share = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", share))
    if not 0.0 <= share <= 1.0:
        raise ModelFileError("config.json: partial_rotary_factor is outside 0 to 1")
    return {
        "rope.freq_base": base,
        "rope.dimension_count": int(head_dim * share),
        **scaling_of(config, grows=grows),
    }


def scaling_of(config: Config, *, grows: bool = True) -> Values:
    """Keys below ``rope.scaling``; ``grows``: yarn makes cos and sin grow unless told otherwise.

    Raises ModelFileError.
    """
    rope = rope_of(config)
    match rope_kind(config):
        case "default" | "mrope":
            return {}
        case "llama3" if config.text("model_type", "") in _WITH_FACTORS:
            return {}  # factors, which are a tensor
        case "linear":
            return {"rope.scaling.type": "linear", "rope.scaling.factor": rope.number("factor")}
        case "yarn":
            return _yarn(config, rope, grows=grows)
        case "longrope" | "su" if config.text("model_type", "") == "phi3":
            return _longrope(config, rope)
        case kind:
            raise ModelFileError(f"config.json: rope scaling {safe_name(kind)} is not supported")


def made_factors(model: FolderModel) -> dict[str, np.ndarray]:
    """Tensors of divisors, float32 [rotated / 2], which a folder has as numbers in its JSON."""
    kind = rope_kind(model.config)
    if model.architecture == "llama" and kind == "llama3":
        return {FACTORS: _llama3(model)}
    if model.architecture == "phi3" and kind in ("longrope", "su"):
        return {
            name: _listed(model, key)
            for name, key in ((LONG, "long_factor"), (SHORT, "short_factor"))
        }
    return {}


def _yarn(config: Config, rope: Config, *, grows: bool) -> Values:
    original = rope.whole(ORIGINAL, config.whole("max_position_embeddings"))
    factor = rope.number("factor", config.whole("max_position_embeddings") / max(original, 1))
    if not factor >= 1:
        raise ModelFileError("config.json: impossible rope parameters")
    plain, all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    own = _growth(factor, 1.0)
    if plain and all_dim:
        own = _growth(factor, plain) / _growth(factor, all_dim)
    own = rope.number("attention_factor", own)
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": original,
        "rope.scaling.yarn_beta_fast": rope.number("beta_fast", 32.0) or 32.0,
        "rope.scaling.yarn_beta_slow": rope.number("beta_slow", 1.0) or 1.0,
        "rope.scaling.yarn_unrounded": not rope.flag("truncate", True),
        "rope.scaling.attn_factor": own / (_growth(factor, 1.0) if grows else 1.0),
    }


def _growth(factor: float, multiplier: float) -> float:
    return 0.1 * multiplier * math.log(factor) + 1.0


def _longrope(config: Config, rope: Config) -> Values:
    original = rope.whole(ORIGINAL, config.whole(ORIGINAL, 4096))
    if original < 2:
        raise ModelFileError("config.json: impossible rope parameters")
    factor = rope.number("factor", config.whole("max_position_embeddings") / original)
    own = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": rope.number("attention_factor", own),
    }


def _listed(model: FolderModel, key: str) -> np.ndarray:
    values = rope_of(model.config).data.get(key)
    rotated = model.values["rope.dimension_count"]
    if (
        not isinstance(values, list)
        or not all(type(value) in (int, float) and abs(value) <= MOST_FACTOR for value in values)
        or not 1 <= len(values) <= MAX_PAIRS
        or 2 * len(values) != rotated
    ):
        raise ModelFileError(f"config.json: {key} is not one number for each rotated pair")
    return np.array(values, np.float32)


def _llama3(model: FolderModel) -> np.ndarray:
    """By wavelength: below original context / high_freq_factor as they are, above original
    context / low_freq_factor divided by the factor, in between a blend."""
    rope = rope_of(model.config)
    rotated, base = model.values["rope.dimension_count"], model.values["rope.freq_base"]
    assert isinstance(rotated, int)
    assert isinstance(base, float)
    context = rope.number(ORIGINAL)
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    factor = rope.number("factor")
    if not (0 < low < high and factor > 0 and base > 0 and 0 < rotated <= 2 * MAX_PAIRS):
        raise ModelFileError("config.json: impossible rope parameters")
    wavelengths = 2 * np.pi * base ** (np.arange(0, rotated, 2) / rotated)
    blend = np.clip((context / wavelengths - low) / (high - low), 0.0, 1.0)
    factors: np.ndarray = (1.0 / ((1.0 - blend) / factor + blend)).astype(np.float32)
    return factors
