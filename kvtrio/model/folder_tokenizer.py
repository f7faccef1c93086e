"""tokenizer.json and its neighbours as the metadata that a GGUF file of the same model has.

Byte-level merge lists come over as they are, with their own rules for cutting words. Merge lists
over characters with byte fallback are SentencePiece vocabularies in another dress: a merge's rank
becomes the score of the token that it makes. The normaliser NFC is left out, as in GGUF files.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from attrs import frozen

from kvtrio.model.errors import ModelFileError, safe_name
from kvtrio.model.folder_config import FolderModel
from kvtrio.model.gguf_reader import MetaValue
from kvtrio.model.paths import OpenPath
from kvtrio.model.pretokenizers import GPT2_PATTERN, PreTokenizer
from kvtrio.model.safetensors_file import parse_json
from kvtrio.model.vocabulary import PREFIX, TokenType

TOKENIZER, SETTINGS, GENERATION = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
)
TEMPLATE = "chat_template.jinja"
MAX_JSON_BYTES = 256 << 20
MAX_TOKENS = 1 << 24
MAX_PATTERN = 10_000
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
    data = _object(folder, TOKENIZER)
    settings = _object(folder, SETTINGS) if folder.has(SETTINGS) else {}
    merges = _part(data, "model")
    if merges.get("type", "BPE") != "BPE":
        raise ModelFileError(
            f"{TOKENIZER}: model {safe_name(str(merges.get('type')))} is not supported"
        )
    texts, types = _tokens(data, merges, model)
    metadata: dict[str, Any] = {"tokens": texts, "token_type": np.array(types, np.int32)}
    is_character = bool(merges.get("byte_fallback"))
    pairs = _pairs(merges)
    rules: PreTokenizer | None = None
    if is_character:
        metadata |= {"model": "llama", "scores": _scores(texts, pairs)}
        metadata["add_space_prefix"] = _adds_space(data)
    else:
        rules = PreTokenizer(
            patterns=tuple(_patterns(data)), ignore_merges=bool(merges.get("ignore_merges"))
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


def _part(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key)
    return value if isinstance(value, dict) else {}


# --- tokens ---


def _tokens(
    data: Mapping[str, Any], merges: Mapping[str, Any], model: FolderModel
) -> tuple[list[str], list[int]]:
    """Texts and types by id, as many as the model has embeddings; what has no text is padding."""
    vocab, added = _part(merges, "vocab"), data.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(each, dict) for each in added):
        raise _damaged("added_tokens")
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
            raise _damaged("a token")
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
        raise _damaged("merges")
    pairs = []
    for each in listed:
        parts = each.split(" ") if isinstance(each, str) else each
        if not isinstance(parts, list) or len(parts) != 2 or not all(type(p) is str for p in parts):
            raise _damaged("merges")
        pairs.append((parts[0], parts[1]))
    return pairs


def _scores(texts: list[str], pairs: list[tuple[str, str]]) -> np.ndarray:
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(pairs):
        ranks.setdefault(left + right, rank)
    scores = [-float(ranks[text]) if text in ranks else UNMERGED for text in texts]
    return np.array(scores, np.float32)


# --- words ---


def _flat(step: Any, key: str) -> Iterator[dict[str, Any]]:
    """The steps of a pre-tokeniser or normaliser, which may be a sequence."""
    if step is None:
        return
    if not isinstance(step, dict):
        raise _damaged(key)
    if step.get("type") != "Sequence":
        yield step
        return
    within = step.get(key)
    if not isinstance(within, list):
        raise _damaged(key)
    for each in within:
        yield from _flat(each, key)


def _patterns(data: Mapping[str, Any]) -> Iterator[str]:
    """Regular expressions that cut words, in order."""
    for step in _flat(data.get("pre_tokenizer"), "pretokenizers"):
        match step.get("type"):
            case "Split":
                yield _split(step)
            case "Digits":
                yield r"\p{N}" if step.get("individual_digits") else r"\p{N}+"
            case "ByteLevel":
                if step.get("add_prefix_space"):
                    raise ModelFileError(f"{TOKENIZER}: add_prefix_space is not supported")
                if step.get("use_regex", True):
                    yield GPT2_PATTERN
            case other:
                name = safe_name(str(other))
                raise ModelFileError(f"{TOKENIZER}: pre-tokenizer {name} is not supported")


def _split(step: Mapping[str, Any]) -> str:
    pattern = _part(step, "pattern").get("Regex")
    behaviour, is_inverted = step.get("behavior"), bool(step.get("invert"))
    is_plain = behaviour == "Isolated" or (behaviour == "Removed" and is_inverted)
    if not isinstance(pattern, str) or not is_plain or len(pattern) > MAX_PATTERN:
        raise ModelFileError(f"{TOKENIZER}: this way of cutting words is not supported")
    return pattern


def _adds_space(data: Mapping[str, Any]) -> bool:
    """Whether a text begins as if a space stood before it."""
    for step in _flat(data.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") == "Metaspace":
            return bool(step.get("prepend_scheme", "always") != "never")
    steps = _flat(data.get("normalizer"), "normalizers")
    return any(step.get("type") == "Prepend" for step in steps)


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
    for step in _flat(data.get("post_processor"), "processors"):
        if step.get("type") == "TemplateProcessing" and isinstance(step.get("single"), list):
            first = next(iter(step["single"]), None)
            special = _part(first, "SpecialToken") if isinstance(first, dict) else {}
            return special.get("id") == bos
    return settings.get("add_bos_token") is True


def _template(folder: OpenPath, settings: Mapping[str, Any]) -> dict[str, MetaValue]:
    """As the key of GGUF files; of several templates the one called default."""
    own = settings.get("chat_template")
    if isinstance(own, list):
        named = {each.get("name"): each.get("template") for each in own if isinstance(each, dict)}
        own = named.get("default")
    if folder.has(TEMPLATE):
        with folder.child(TEMPLATE) as child:
            own = bytes(child.read(MAX_JSON_BYTES)).decode("utf-8", "replace")
    return {"tokenizer.chat_template": own} if isinstance(own, str) and own else {}


def _damaged(what: str) -> ModelFileError:
    return ModelFileError(f"{TOKENIZER} is damaged: {what}")
