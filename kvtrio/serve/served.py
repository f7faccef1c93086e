"""What the HTTP layer knows of the model it serves: text in, text out, and facts to show."""

from collections.abc import Sequence
from typing import Protocol

from attrs import frozen

from kvtrio.model.spec import ModelSpec
from kvtrio.model.template import ChatTemplate
from kvtrio.model.tokenizer import Fragment


class TextTokenizer(Protocol):
    """The part of ``kvtrio.model.tokenizer.Tokenizer`` that the routes use."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eog_ids(self) -> frozenset[int]: ...

    @property
    def bos_text(self) -> str: ...

    @property
    def eos_text(self) -> str: ...

    @property
    def add_bos(self) -> bool: ...

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_control(self, token_id: int) -> bool: ...

    @property
    def add_eos(self) -> bool: ...

    def fragments(self, text: str, *, parse_special: bool) -> list[Fragment]: ...

    def encode_fragment(self, fragment: Fragment) -> list[int]: ...


@frozen(kw_only=True)
class ServedModel:
    """Built once by the command line, before the first request."""

    alias: str
    """The model's name in every answer."""
    tokenizer: TextTokenizer
    template: ChatTemplate
    spec: ModelSpec
    model_path_name: str
    """The file's name; its folder is nobody's business."""
    size: int
    """Bytes of the weights in the file."""
    n_params: int
    ftype: str
    vocab_type: int = 0
    """llama.cpp's number for the kind of vocabulary: 1 SentencePiece, 2 byte-level BPE."""
    template_note: str | None = None
    """Set when the model brought no template of its own: which one stands in."""
