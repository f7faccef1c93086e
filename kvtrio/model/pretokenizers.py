"""How byte-level BPE vocabularies cut text into words, by the ``tokenizer.ggml.pre`` name.

The names and what each stands for are facts from llama.cpp's ``src/llama-vocab.cpp`` (MIT), written
for Oniguruma, the regular expressions of the ``tokenizers`` library. Each pattern is applied to the
pieces the one before it left; what lies between two matches is a piece of its own. Contractions are
spelled out because ``(?i:'s)`` would also match the long s. Where a plain form would try a
whole run of spaces again from each of its places, a lookbehind keeps it to the first.
"""

import re

from attrs import frozen

_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_PUNCTUATION}[\r\n]*|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK3_MAIN = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _ranges(spelled: str) -> str:
    """Inside of a character class, from code points in hexadecimal: "41-5A B5"."""
    return re.sub(r"[0-9A-F]+", r"\\x{\g<0>}", spelled).replace(" ", "")


_CJK = f"[{_ranges('4E00-9FA5 800-4E00 AC00-D7FF')}]+"
_CJK_KANA = f"[{_ranges('4E00-9FA5 3040-309F 30A0-30FF')}]+"
_DEEPSEEK_MARKS = r"!-/:-~" + _ranges("FF01-FF0F FF1A-FF5E 2018-201F 3000-3002")
_DEEPSEEK_LETTERS = _ranges(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386"
    " 388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA"
    " 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57"
    " 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB"
    " 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D"
    " 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3"
    " A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A"
    " FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
# A letter outside a-z, and one outside A-Z: llama.cpp's stand-in for upper and lower case.
_UPPER = r"[\p{L}&&[^a-z]]"
_LOWER = r"[\p{L}&&[^A-Z]]"


def _cased(tail: str) -> str:
    """Words that start in capitals and go on in small letters, or capitals alone."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return rf"{lead}{_UPPER}*{_LOWER}+{tail}|{lead}{_UPPER}+{_LOWER}*{tail}"


_TEKKEN = rf"{_cased('')}|\p{{N}}|{_PUNCTUATION}[\r\n/]*|{_SPACES}"
_GPT4O = rf"{_cased(_CONTRACTION + '?')}|\p{{N}}{{1,3}}|{_PUNCTUATION}[\r\n/]*|{_SPACES}"
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"
_FALCON_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
_DEFAULT_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"


@frozen(kw_only=True)
class PreTokenizer:
    """One family's rules."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A word that is a token as a whole is taken without merging."""
    add_bos: bool = False
    """Default where the file does not say."""
    is_raw: bool = False
    """Merges work on characters with U+2581 for the space, not on the byte alphabet."""


_FAMILIES: dict[PreTokenizer, str] = {
    PreTokenizer(patterns=(_LLAMA3,), ignore_merges=True, add_bos=True): (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
    ),
    PreTokenizer(patterns=(_LLAMA3,)): "dbrx smaug-bpe chatglm-bpe",
    PreTokenizer(patterns=(_LLAMA3,), ignore_merges=True): "glm4 glm5",
    PreTokenizer(patterns=(GPT2_PATTERN,)): (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert mpt"
        " olmo jais trillion granite-docling exaone4"
    ),
    PreTokenizer(patterns=(r"\p{N}", GPT2_PATTERN)): (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"
    ),
    PreTokenizer(patterns=(_QWEN2,)): (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2"
    ),
    PreTokenizer(patterns=(_QWEN35,)): "qwen35",
    PreTokenizer(patterns=(r"[^\n]+|[\n]+", _QWEN2)): "laguna",
    PreTokenizer(
        patterns=(rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
    ): "seed-coder",
    PreTokenizer(
        patterns=(
            r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"
            rf"|{_WORD}|\p{{N}}|{_PUNCTUATION}[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ): "bailingmoe bailingmoe2 llada-moe",
    PreTokenizer(
        patterns=(
            r"\p{N}{1,3}",
            rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_PUNCTUATION}[\r\n]*|{_SPACES}",
        ),
        ignore_merges=True,
    ): "minicpm5",
    PreTokenizer(patterns=(rf"{_WORD}|\p{{N}}|{_PUNCTUATION}[\r\n]*|{_SPACES}",)): "ufakzeka",
    PreTokenizer(
        patterns=(
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
            rf"|\p{{N}}|{_PUNCTUATION}[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ): "exaone-moe",
    PreTokenizer(patterns=(_TEKKEN,), ignore_merges=True, add_bos=True): "tekken",
    PreTokenizer(patterns=(_GPT4O,)): "gpt-4o llama4 kanana2 talkie minimax-m2",
    PreTokenizer(patterns=(r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK3_MAIN)): (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4"
    ),
    PreTokenizer(
        patterns=(
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            rf"\s?[{_DEEPSEEK_MARKS}]+",
            r"(?<!\s)\s++$",
            _CJK,
            r"\p{N}+",
        )
    ): "deepseek-llm",
    PreTokenizer(patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")): (
        "deepseek-coder"
    ),
    PreTokenizer(patterns=(_FALCON_PUNCTUATION, GPT2_PATTERN, r"[0-9][0-9][0-9]")): "falcon",
    PreTokenizer(
        patterns=(_DEFAULT_PUNCTUATION, GPT2_PATTERN, r"\p{N}+", r"[0-9][0-9][0-9]")
    ): "default",
    PreTokenizer(patterns=(_BLOOM,)): "poro-chat bloom gpt3-finnish",
    PreTokenizer(patterns=(_BLOOM, r"\p{N}")): "viking",
    PreTokenizer(patterns=(), add_bos=True, is_raw=True): "gemma4 granite-embed-multi-311m",
}

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: rules for rules, names in _FAMILIES.items() for name in names.split()
}
