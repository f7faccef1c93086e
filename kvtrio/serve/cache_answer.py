"""``kvtrio.cache`` in answers: what was reused, from where, and why not more."""

from typing import Any

from kvtrio.core.explain import CacheReport
from kvtrio.serve.accounts import timings
from kvtrio.serve.choice import Choice
from kvtrio.serve.errors import forecast


def ending(choice: Choice) -> dict[str, Any]:
    """What an answer tells at its end, in every dialect."""
    return {"timings": timings(choice), "kvtrio": _extension(choice)}


def _extension(choice: Choice) -> dict[str, Any]:
    finished = choice.finished
    assert finished is not None
    report = finished.cache
    session = {} if choice.session is None else {"session": choice.session.told()}
    return {
        **forecast(choice.predicted_s),
        **session,
        "cache": {
            "tier": _tier(report),
            "path": report.path.value,
            "reason": report.reason.value,
            "turn": report.turn.value,
            "reused_device": report.num_device_tokens,
            "reused_ram": report.num_host_tokens,
            "reused_disk": report.num_disk_tokens,
            "computed": finished.num_computed_tokens,
            "matched": report.num_matched_tokens,
            "other_adapter_match": report.num_other_tokens,
            "divergence": _divergence(choice, report),
            "evicted_age_s": report.evicted_age_s,
            "recalled": choice.job.num_recalled_of(choice.index),
        },
    }


def _tier(report: CacheReport) -> str | None:
    """The farthest tier that had a part in it."""
    if report.num_disk_tokens:
        return "disk"
    if report.num_host_tokens:
        return "ram"
    return "device" if report.num_device_tokens else None


def _divergence(choice: Choice, report: CacheReport) -> dict[str, Any] | None:
    if not report.is_divergence:
        return None
    place = choice.divergence
    return {
        "position": report.num_matched_tokens,
        "message_index": place.message_index if place else None,
        "section": place.section.value if place else None,
    }
