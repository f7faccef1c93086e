"""What the layers of a model are read from, and how large their numbers may be."""

from attrs import frozen

from kvtrio.model.families import Family
from kvtrio.model.fields import Fields
from kvtrio.model.model_file import ModelFile

MAX_LAYERS = 1024
MAX_CONTEXT = 1 << 31
MAX_HEADS = 4096
MAX_HEAD_DIM = 8192
MAX_SIZE = 1 << 22
"""Hidden and feed-forward size."""
MAX_EXPERTS = 4096
MAX_CONV_WIDTH = 64


@frozen(kw_only=True)
class Source:
    """One model file whose architecture is known."""

    file: ModelFile
    family: Family
    fields: Fields
    num_layers: int
    hidden_size: int

    def heads(self) -> list[tuple[int, int]]:
        """Heads and key heads per layer; 0 where a hybrid has no attention."""
        key, num_layers = "attention.head_count", self.num_layers
        heads = self.fields.per_layer(key, num_layers, MAX_HEADS, self._least_heads())
        return list(zip(heads, self.kv_heads(), strict=True))

    def kv_heads(self) -> tuple[int, ...]:
        key = "attention.head_count_kv"
        if not self.fields.has(key):
            key = "attention.head_count"
        return self.fields.per_layer(key, self.num_layers, MAX_HEADS, self._least_heads())

    def _least_heads(self) -> int:
        return int(self.family.recurrent is None)
