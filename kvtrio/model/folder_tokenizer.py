"""tokenizer.json and its neighbours as the metadata that a GGUF file of the same model has.

Byte-level merge lists come over as they are, with their own rules for cutting words. Merge lists
over characters with byte fallback are SentencePiece vocabularies in another dress: a merge's rank
becomes the score of the token that it makes. The normaliser NFC is left out, as in GGUF files.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from attrs import frozen

from kvtrio.model.errors import ModelFileError, safe_name
from kvtrio.model.folder_config import FolderModel
from kvtrio.model.folder_words import (
    TOKENIZER,
    check_normaliser,
    damaged,
    part_of,
    patterns_of,
    space_prefix,
    steps_of,
)
from kvtrio.model.gguf_reader import MetaValue
from kvtrio.model.paths import OpenPath
from kvtrio.model.pretokenizers import PreTokenizer
from kvtrio.model.safetensors_file import parse_json
from kvtrio.model.special_tokens import SPACES_BEFORE, SPACES_BEHIND
from kvtrio.model.vocabulary import PREFIX, TokenType

SETTINGS, GENERATION = "tokenizer_config.json", "generation_config.json"
TEMPLATE, OLD_TEMPLATE = "chat_template.jinja", "chat_template.json"
MAX_JSON_BYTES = 256 << 20
MAX_TOKENS = 1 << 24
UNMERGED = -1e9
"""Score of a token that no merge makes."""


@frozen(kw_only=True)
class FolderTokenizer:
    """What the files say."""

    metadata: Mapping[str, MetaValue]
    rules: PreTokenizer | None
    """How words are cut; None: the kind of vocabulary says so."""


def read_tokenizer(folder: OpenPath, model: FolderModel) -> FolderTokenizer:
    """Raises ModelFileError."""
    if not folder.has(TOKENIZER):
        raise ModelFileError(
            f"{TOKENIZER} is missing; AutoTokenizer.from_pretrained(...).save_pretrained(...) of "
            "transformers makes one from older files"
        )
    data = _object(folder, TOKENIZER)
    settings = _object(folder, SETTINGS) if folder.has(SETTINGS) else {}
    merges = part_of(data, "model")
    if merges.get("type", "BPE") != "BPE":
        raise ModelFileError(
            f"{TOKENIZER}: model {safe_name(str(merges.get('type')))} is not supported"
        )
    added = _added(data, model.config.whole("vocab_size"))
    texts, types = _tokens(added, merges, model)
    metadata: dict[str, Any] = {"tokens": texts, "token_type": np.array(types, np.int32)}
    metadata["token_spaces"] = _spaces(added, len(texts))
    is_character = bool(merges.get("byte_fallback"))
    check_normaliser(data, merges)
    pairs = _pairs(merges)
    rules: PreTokenizer | None = None
    if is_character:
        metadata |= {"model": "llama", "scores": _scores(texts, pairs)}
        prefix = space_prefix(data)
        metadata |= {"add_space_prefix": prefix != "never", "space_prefix": prefix}
    else:
        rules = PreTokenizer(
            patterns=tuple(patterns_of(data)), ignore_merges=bool(merges.get("ignore_merges"))
        )
        metadata |= {"model": "gpt2", "merges": [f"{left} {right}" for left, right in pairs]}
    metadata |= _ends(folder, settings, model, texts)
    bos = metadata.get("bos_token_id")
    metadata["add_bos_token"] = bos is not None and _adds_bos(data, settings, texts[bos])
    named = {PREFIX + key: value for key, value in metadata.items()}
    return FolderTokenizer(metadata=named | _template(folder, settings), rules=rules)


def _object(folder: OpenPath, name: str) -> dict[str, Any]:
    if not folder.has(name):
        raise ModelFileError(f"{name} is missing")
    with folder.child(name) as child:
        raw = bytes(child.read(MAX_JSON_BYTES))
    try:
        data = parse_json(raw)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise ModelFileError(f"{name} is damaged")
    return data


# --- tokens ---


Added = list[dict[str, Any]]


def _added(data: Mapping[str, Any], size: int) -> Added:
    """Entries of tokens outside the merges. Those of images may have no embedding: left out."""
    added = data.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(each, dict) for each in added):
        raise damaged("added_tokens")
    return [each for each in added if type(each.get("id")) is not int or each["id"] < size]


def _spaces(added: Added, size: int) -> np.ndarray:
    """uint8 [size]: which of the spaces around a token belong to it."""
    spaces = np.zeros(size, np.uint8)
    for each in added:
        before, behind = bool(each.get("lstrip")), bool(each.get("rstrip"))
        spaces[each["id"]] = SPACES_BEFORE * before + SPACES_BEHIND * behind
    return spaces


def _tokens(
    added: Added, merges: Mapping[str, Any], model: FolderModel
) -> tuple[list[str], list[int]]:
    """Texts and types by id, as many as the model has embeddings; what has no text is padding."""
    vocab = part_of(merges, "vocab")
    entries: list[tuple[Any, Any, TokenType]] = [
        (text, token, TokenType.NORMAL) for text, token in vocab.items()
    ]
    entries += [
        (
            each.get("content"),
            each.get("id"),
            TokenType.CONTROL if each.get("special") else TokenType.USER_DEFINED,
        )
        for each in added
    ]
    size = model.config.whole("vocab_size")
    if not 1 <= size <= MAX_TOKENS:
        raise ModelFileError("config.json: vocab_size is out of range")
    texts = [f"[PAD{token}]" for token in range(size)]
    types = [int(TokenType.UNUSED)] * size
    for text, token, kind in entries:
        if not isinstance(text, str) or type(token) is not int or not 0 <= token < size:
            raise damaged("a token")
        texts[token], types[token] = text, int(_kind(text, kind, merges))
    return texts, types


def _kind(text: str, kind: TokenType, merges: Mapping[str, Any]) -> TokenType:
    if not merges.get("byte_fallback"):
        return kind
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return TokenType.BYTE
    return TokenType.UNKNOWN if text == merges.get("unk_token") else kind


def _pairs(merges: Mapping[str, Any]) -> list[tuple[str, str]]:
    """In order of rank; written as "a b" or as two texts."""
    listed = merges.get("merges")
    if not isinstance(listed, list):
        raise damaged("merges")
    pairs = []
    for each in listed:
        parts = each.split(" ") if isinstance(each, str) else each
        if not isinstance(parts, list) or len(parts) != 2 or not all(type(p) is str for p in parts):
            raise damaged("merges")
        pairs.append((parts[0], parts[1]))
    return pairs


def _scores(texts: list[str], pairs: list[tuple[str, str]]) -> np.ndarray:
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(pairs):
        ranks.setdefault(left + right, rank)
    scores = [-float(ranks[text]) if text in ranks else UNMERGED for text in texts]
    return np.array(scores, np.float32)


# --- ends, template ---


def _ends(
    folder: OpenPath, settings: Mapping[str, Any], model: FolderModel, texts: list[str]
) -> dict[str, int]:
    """Ids of the tokens that begin and end a text. The generation's settings know ends best."""
    generation = _object(folder, GENERATION) if folder.has(GENERATION) else {}
    ids = {text: token for token, text in enumerate(texts)}
    named = {role: ids.get(_content(settings.get(f"{role}_token"))) for role in ("bos", "eos")}
    found: dict[str, int] = {}
    bos = named["bos"] if named["bos"] is not None else model.config.data.get("bos_token_id")
    ends = generation.get("eos_token_id", model.config.data.get("eos_token_id"))
    listed = [end for end in (ends if isinstance(ends, list) else [ends]) if type(end) is int]
    if named["eos"] is not None:
        listed = [named["eos"], *(end for end in listed if end != named["eos"])]
    known = [end for end in listed if 0 <= end < len(texts)]
    for role, token in zip(("eos", "eot", "eom"), known, strict=False):
        found[f"{role}_token_id"] = token
    if type(bos) is int and 0 <= bos < len(texts):
        found["bos_token_id"] = bos
    return found


def _content(token: Any) -> str:
    """A special token is written as a text, or as an object around it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _adds_bos(data: Mapping[str, Any], settings: Mapping[str, Any], bos: str) -> bool:
    for step in steps_of(data.get("post_processor"), "processors"):
        if step.get("type") == "TemplateProcessing" and isinstance(step.get("single"), list):
            first = next(iter(step["single"]), None)
            special = part_of(first, "SpecialToken") if isinstance(first, dict) else {}
            return special.get("id") == bos
    return settings.get("add_bos_token") is True


def _template(folder: OpenPath, settings: Mapping[str, Any]) -> dict[str, MetaValue]:
    """As the key of GGUF files; of several templates the one called default."""
    own = settings.get("chat_template")
    if own is None and folder.has(OLD_TEMPLATE):
        own = _object(folder, OLD_TEMPLATE).get("chat_template")
    if isinstance(own, list):
        known = [each for each in own if isinstance(each, dict) and each.get("name") == "default"]
        own = known[0].get("template") if known else None
    if folder.has(TEMPLATE):
        with folder.child(TEMPLATE) as child:
            own = bytes(child.read(MAX_JSON_BYTES)).decode("utf-8", "replace")
    return {"tokenizer.chat_template": own} if isinstance(own, str) and own else {}
