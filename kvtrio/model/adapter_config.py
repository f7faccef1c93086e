"""PEFT's adapter_config.json: the few settings that decide the result, and refusals of the rest.

Meaning of the settings: ``peft.LoraConfig`` of PEFT 0.18,
https://huggingface.co/docs/peft/package_reference/lora. Which modules have an adapter is known from
the tensors, so target_modules, layers_to_transform and the like are not read.
"""

import re
from collections.abc import Callable, Mapping
from math import sqrt

from attrs import frozen

from kvtrio.model.adapter_pairs import MAX_RANK
from kvtrio.model.errors import ModelFileError, safe_name
from kvtrio.model.safetensors_file import parse_json

MAX_PATTERNS = 4096
MAX_PATTERN = 256
MAX_REPEATS = 2

_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "a full module beside the adapter",
    "fan_in_fan_out": "storing weights as [in, out]",
    "lora_bias": "a bias in the adapter",
    "layer_replication": "replicating layers",
    "trainable_token_indices": "new embeddings",
    "target_parameters": "adapting bare parameters",
    "arrow_config": "Arrow routing",
}
_KEEPING_INITS = ("gaussian", "eva", "orthogonal")
"""Initialisations by name that leave the base weights alone. After the others (PiSSA, OLoRA, CorDA,
LoftQ) the adapter belongs to changed base weights, which are not in its folder."""
MAX_NUMBER = 1e9

_PATTERN = re.compile(
    r"\^?(?:[A-Za-z0-9_-]|\\[.d][*+]?|\.[*+]?|\[[A-Za-z0-9_-]+\][*+]?|\((?:\?:)?|\)|\|)*\$?"
)
"""The regular expressions we accept: no repeated group, so that matching cannot take for ever."""


@frozen
class Patterns:
    """Values per module, by the first expression that matches the end of its path."""

    entries: tuple[tuple[re.Pattern[str], float], ...]

    def get(self, module: str, default: float) -> float:
        matching = (value for pattern, value in self.entries if pattern.fullmatch(module))
        return next(matching, default)


@frozen(kw_only=True)
class PeftConfig:
    """What scales an adapter."""

    rank: float
    alpha: float
    ranks: Patterns
    alphas: Patterns
    rank_stabilised: bool
    invocation_tokens: tuple[int, ...]
    """As stated; unchecked against a vocabulary."""

    def scaling(self, module: str, rank: int) -> float:
        """Factor of a module, whose tensors have ``rank``.

        Raises ModelFileError when the config states another rank: one of the two is wrong, and
        with it the factor.
        """
        stated = self.ranks.get(module, self.rank)
        if stated != rank:
            raise ModelFileError(
                f"module {safe_name(module)} has rank {rank}, but its config says {stated:g}"
            )
        alpha = self.alphas.get(module, self.alpha)
        return alpha / sqrt(rank) if self.rank_stabilised else alpha / rank


def read_peft_config(raw: bytes) -> PeftConfig:
    """Raises ModelFileError for what is malformed or changes the model in ways we do not know."""
    try:
        config = parse_json(raw)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ModelFileError("not a JSON object")
    _refuse(config)
    return PeftConfig(
        rank=_rank("r", config.get("r")),
        alpha=_number("lora_alpha", config.get("lora_alpha")),
        ranks=_patterns(config, "rank_pattern", _rank),
        alphas=_patterns(config, "alpha_pattern", _number),
        rank_stabilised=_flag(config, "use_rslora"),
        invocation_tokens=_tokens(config),
    )


def _refuse(config: Mapping[str, object]) -> None:
    if config.get("peft_type") != "LORA":
        raise ModelFileError("peft_type is not LORA; other kinds of adapters are not supported")
    for key, what in _REFUSED.items():
        if config.get(key):
            raise ModelFileError(f"{what} ({key}) is not supported")
    for key, value in config.items():
        # Flags that turn plain LoRA into something else: some appear with every release.
        if key.startswith("use_") and value and key != "use_rslora":
            raise ModelFileError(f"the setting {safe_name(key)} is not supported")
    if config.get("bias") not in (None, "none"):
        raise ModelFileError("training biases (bias) is not supported")
    start = config.get("init_lora_weights")
    if not (start is None or isinstance(start, bool) or start in _KEEPING_INITS):
        raise ModelFileError(
            "init_lora_weights names a method that changes the base weights; save the adapter "
            "converted to plain LoRA"
        )


def _number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelFileError(f"{key} is missing or not a number")
    # Written so that NaN fails too.
    if not abs(value) <= MAX_NUMBER:
        raise ModelFileError(f"{key} is not finite or beyond {MAX_NUMBER:g}")
    return float(value)


def _rank(key: str, value: object) -> float:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise ModelFileError(f"{key} is not a whole number from 1 to {MAX_RANK}")
    return float(value)


def _flag(config: Mapping[str, object], key: str) -> bool:
    value = config.get(key) or False
    if not isinstance(value, bool):
        raise ModelFileError(f"{key} is neither true nor false")
    return value


def _patterns(
    config: Mapping[str, object], key: str, check: Callable[[str, object], float]
) -> Patterns:
    entries = config.get(key) or {}
    if not isinstance(entries, dict) or len(entries) > MAX_PATTERNS:
        raise ModelFileError(f"{key} is not an object of at most {MAX_PATTERNS} entries")
    return Patterns(
        tuple((_compiled(key, text), check(key, value)) for text, value in entries.items())
    )


def _compiled(key: str, text: str) -> re.Pattern[str]:
    """As PEFT matches: the expression must cover the end of a path, from a dot or the start on."""
    is_plain = len(text) <= MAX_PATTERN and _PATTERN.fullmatch(text) is not None
    if is_plain and text.count("*") + text.count("+") <= MAX_REPEATS:
        try:
            return re.compile(rf"(?:.*\.)?(?:{text})$")
        except re.error:
            pass
    raise ModelFileError(f"{key} holds an expression that is not supported")


def _tokens(config: Mapping[str, object]) -> tuple[int, ...]:
    value = config.get("alora_invocation_tokens")
    if value is None:
        if config.get("alora_invocation_string") or config.get("invocation_string"):
            raise ModelFileError("it has an invocation string but no alora_invocation_tokens")
        return ()
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ModelFileError("alora_invocation_tokens is not a list of token ids")
    return tuple(value)
