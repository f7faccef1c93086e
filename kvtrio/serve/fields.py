"""Request fields that this server knows of and does not have: refused, or ignored with a reason.

A field in neither table and in no schema is unknown to every dialect we speak; it is ignored, as
llama-server does (clients attach fields of their own). A *known* field is ignored only if leaving
it out changes nothing that the client could count on; anything else is refused when it is set.
"""

from collections.abc import Mapping

import msgspec

from kvtrio.serve.errors import NOT_SUPPORTED, ApiError

Members = Mapping[str, msgspec.Raw]
"""A JSON object whose values were not looked at yet."""

REFUSED: Mapping[str, tuple[object, ...]] = {
    # what the model may say (grammars come later)
    "grammar": (),
    "json_schema": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "bad_words": (),
    "allowed_token_ids": (),
    "logits_processors": (),
    # tools
    "tools": (),
    "functions": (),
    "function_call": ("none", "auto"),
    "web_search_options": (),
    # samplers we do not have
    "mirostat": (),
    "dry_multiplier": (),
    "xtc_probability": (),
    "dynatemp_range": (),
    "adaptive_target": (-1, -1.0),
    "min_keep": (),
    "post_sampling_probs": (),
    "use_beam_search": (),
    # other ways to end an answer
    "min_tokens": (),
    "stop_token_ids": (),
    "include_stop_str_in_output": (),
    "t_max_predict_ms": (-1,),
    # other inputs and outputs
    "echo": (),
    "suffix": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "images": (),
    "image_data": (),
    "audio": (),
    "modalities": (["text"],),
}
"""Field -> values besides null, false, 0 and emptiness that mean "not used"."""

IGNORED: Mapping[str, str] = {
    "safety_identifier": "nobody is watched; nothing of it is kept",
    "metadata": "nothing is stored",
    "store": "nothing is stored",
    "service_tier": "there is one",
    "prompt_cache_key": "reuse is decided by the tokens alone",
    "prompt_cache_retention": "as prompt_cache_key",
    "n_cache_reuse": "would shift state to other positions: never exact",
    "prediction": "would only be faster",
    "parallel_tool_calls": "without tools it has no meaning",
    "tool_choice": "without tools it has no meaning",
    "verbosity": "a hint to one maker's models",
    "samplers": "the order of samplers is fixed; switch one off by its own field",
    "mirostat_tau": "only with mirostat, which is refused",
    "mirostat_eta": "only with mirostat, which is refused",
    "dry_base": "only with dry_multiplier, which is refused",
    "dry_allowed_length": "only with dry_multiplier, which is refused",
    "dry_penalty_last_n": "only with dry_multiplier, which is refused",
    "dry_sequence_breakers": "only with dry_multiplier, which is refused",
    "xtc_threshold": "only with xtc_probability, which is refused",
    "dynatemp_exponent": "only with dynatemp_range, which is refused",
    "adaptive_decay": "only with adaptive_target, which is refused",
    "grammar_lazy": "only with grammar, which is refused",
    "grammar_triggers": "only with grammar, which is refused",
    "preserved_tokens": "only with grammar, which is refused",
    "backend_sampling": "where sampling happens is ours to choose",
    "n_keep": "the context is never shifted",
    "n_discard": "the context is never shifted",
    "n_indent": "only for infill, which this server does not have",
    "reasoning_format": "reasoning stays in the text, as the model wrote it",
    "reasoning_control": "as reasoning_format",
    "reasoning_budget_tokens": "as reasoning_format",
    "thinking_budget_tokens": "as reasoning_format",
    "verbose": "debugging output is never part of an answer",
    "skip_special_tokens": "control tokens have no text",
}
"""Field -> why it can be left out."""

_OFF: tuple[object, ...] = (None, False, 0, "", [], {})


def refuse_unsupported(members: Members) -> None:
    """Raise ``ApiError`` if a field of ``REFUSED`` is set to anything that would do something."""
    for name, neutral in REFUSED.items():
        if name in members and not _is_unused(members, name, neutral):
            raise ApiError(NOT_SUPPORTED, name)


def _is_unused(members: Members, name: str, neutral: tuple[object, ...]) -> bool:
    value = msgspec.json.decode(members[name])
    if name in ("tools", "functions") and _value(members, "tool_choice") == "none":
        return True
    return value in _OFF or value in neutral


def _value(members: Members, name: str) -> object:
    return msgspec.json.decode(members[name]) if name in members else None
