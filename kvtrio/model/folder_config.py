"""config.json of a Hugging Face folder: typed access, and what most kinds of model have in it."""

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from kvtrio.model.errors import ModelFileError
from kvtrio.model.gguf_reader import MetaValue

MAX_LAYERS = 1024
MOST_WHOLE, MOST_NUMBER = 1 << 53, 1.7e308
"""Beyond these, arithmetic with floats would fail."""
Values = dict[str, MetaValue]
FULL, SLIDING = "full_attention", "sliding_attention"
ATTENTION_LAYERS = (FULL, "attention")


@frozen
class Config:
    """The JSON object, with typed access. All methods raise ModelFileError."""

    data: Mapping[str, Any]

    def has(self, key: str) -> bool:
        return self.data.get(key) is not None

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key)
        value = default if value is None else value
        if type(value) is not int or abs(value) > MOST_WHOLE:
            raise self._wrong(key, "a whole number of at most 16 digits")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.data.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        # Written so that NaN fails too; an integer may be larger than any float.
        if not abs(value) <= MOST_NUMBER:
            raise self._wrong(key, "a number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self._wrong(key, "text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def part(self, key: str) -> "Config":
        """An object within; an empty one where there is none."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return Config(value or {})

    def layer_types(self, num_layers: int) -> list[str]:
        value = self.data.get("layer_types")
        if not isinstance(value, list) or len(value) != num_layers:
            raise self._wrong("layer_types", "one word for each layer")
        if not all(isinstance(word, str) for word in value):
            raise self._wrong("layer_types", "one word for each layer")
        return value

    def must_be(self, key: str, value: object) -> None:
        """Refuse any other value: nothing here computes it."""
        if self.data.get(key, value) not in (value, None):
            raise ModelFileError(f"config.json: another {key} than {value} is not supported")

    def _wrong(self, key: str, what: str) -> ModelFileError:
        if key not in self.data:
            return ModelFileError(f"config.json: {key} is missing")
        return ModelFileError(f"config.json: {key} is not {what}")


@frozen(kw_only=True)
class FolderModel:
    """What config.json says."""

    architecture: str
    """Ours."""
    kind: str
    """Its model_type."""
    config: Config
    """Of the text model, where there is more than one."""
    values: Mapping[str, MetaValue]
    """Without the architecture before each name."""


# --- what most have ---


def attending(config: Config) -> Values:
    """Sizes and heads, of models with RMSNorm and gated feed-forwards; rope comes on top."""
    num_heads = config.whole("num_attention_heads")
    hidden = config.whole("hidden_size")
    if num_heads < 1:
        raise ModelFileError("config.json: num_attention_heads is not above zero")
    head_dim = config.whole("head_dim", hidden // num_heads)
    config.must_be("hidden_act", "silu")
    return {
        **sizes_of(config),
        "attention.layer_norm_rms_epsilon": config.number("rms_norm_eps", 1e-6),
        "attention.head_count": num_heads,
        "attention.head_count_kv": config.whole("num_key_value_heads", num_heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
    }


def sizes_of(config: Config) -> Values:
    num_layers = config.whole("num_hidden_layers")
    if not 1 <= num_layers <= MAX_LAYERS:
        raise ModelFileError(f"config.json: num_hidden_layers is outside 1 to {MAX_LAYERS}")
    sizes: Values = {"block_count": num_layers, "embedding_length": config.whole("hidden_size")}
    if config.has("intermediate_size"):
        sizes["feed_forward_length"] = config.whole("intermediate_size")
    if config.has("max_position_embeddings"):
        sizes["context_length"] = config.whole("max_position_embeddings")
    return sizes


def query_scale(config: Config) -> float:
    """Gemma's own key for what scores are multiplied by."""
    scalar = config.number("query_pre_attn_scalar", 256.0)
    if not scalar > 0.0:
        raise ModelFileError("config.json: query_pre_attn_scalar is not above zero")
    return float(scalar**-0.5)


def rope_of(config: Config) -> Config:
    """The rope's own settings, wherever this version of the format has them."""
    for key in ("rope_parameters", "rope_scaling"):
        if config.has(key):
            return config.part(key)
    return Config({})


def rope_kind(config: Config) -> str:
    rope = rope_of(config)
    return rope.text("rope_type", rope.text("type", "default"))
