"""How tokenizer.json cuts and changes text: what is read of it, and what is refused."""

from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Regex

from kvtrio.model.bpe import SPACE_MARK
from kvtrio.model.errors import ModelFileError, safe_name
from kvtrio.model.pretokenizers import GPT2_PATTERN

TOKENIZER = "tokenizer.json"
MAX_PATTERN = 10_000


def part_of(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key)
    return value if isinstance(value, dict) else {}


def steps_of(step: Any, key: str) -> Iterator[dict[str, Any]]:
    """The steps of a pre-tokeniser or normaliser, which may be a sequence."""
    if step is None:
        return
    if not isinstance(step, dict):
        raise damaged(key)
    if step.get("type") != "Sequence":
        yield step
        return
    within = step.get(key)
    if not isinstance(within, list):
        raise damaged(key)
    for each in within:
        yield from steps_of(each, key)


def check_normaliser(data: Mapping[str, Any], merges: Mapping[str, Any]) -> None:
    """Refuse what would change a text in ways that nothing here does."""
    known = {"NFC"}
    if merges.get("byte_fallback"):
        known |= {"Prepend", "Replace"}
    for step in steps_of(data.get("normalizer"), "normalizers"):
        if step.get("type") not in known:
            name = safe_name(str(step.get("type")))
            raise ModelFileError(f"{TOKENIZER}: normaliser {name} is not supported")
        spelled = part_of(step, "pattern").get("String")
        if step["type"] == "Replace" and (spelled, step.get("content")) != (" ", SPACE_MARK):
            raise ModelFileError(f"{TOKENIZER}: this way of replacing text is not supported")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if merges.get(key):
            raise ModelFileError(f"{TOKENIZER}: {key} is not supported")


def patterns_of(data: Mapping[str, Any]) -> Iterator[str]:
    """Regular expressions that cut words, in order."""
    for step in steps_of(data.get("pre_tokenizer"), "pretokenizers"):
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
    pattern = part_of(step, "pattern").get("Regex")
    behaviour, is_inverted = step.get("behavior"), bool(step.get("invert"))
    is_plain = behaviour == "Isolated" or (behaviour == "Removed" and is_inverted)
    if not isinstance(pattern, str) or not is_plain or len(pattern) > MAX_PATTERN:
        raise ModelFileError(f"{TOKENIZER}: this way of cutting words is not supported")
    try:
        Regex(pattern)
    except Exception:  # the library has no other class for it
        raise damaged("a pattern that cuts words") from None
    return pattern


def space_prefix(data: Mapping[str, Any]) -> str:
    """Whether a text begins as if a space stood before it: "never"; "always", behind special
    tokens, too; "once", unless it begins with one; "first", the same at the start alone."""
    for step in steps_of(data.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") == "Metaspace":
            scheme = step.get("prepend_scheme", "always")
            return scheme if scheme in ("never", "first") else "once"
    steps = steps_of(data.get("normalizer"), "normalizers")
    return "always" if any(step.get("type") == "Prepend" for step in steps) else "never"


def damaged(what: str) -> ModelFileError:
    return ModelFileError(f"{TOKENIZER} is damaged: {what}")
