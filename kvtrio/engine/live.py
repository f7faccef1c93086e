"""What the engine keeps of an admitted request, and the account it makes of it at the end."""

from attrs import field, frozen

from kvtrio.core.events import Finished, Gap, Submit
from kvtrio.core.identity import effective
from kvtrio.core.types import GapCause
from kvtrio.engine.handle import Handle
from kvtrio.engine.records import Gaps, RequestRecord


@frozen(eq=False)
class Live:
    """One admitted request, until its end was told."""

    handle: Handle
    submit: Submit
    gaps: Gaps = field(factory=Gaps)


def record_of(finished: Finished, live: Live) -> RequestRecord:
    return account(finished, live.submit, live.gaps, _longest_gap(finished, live.handle))


def account(
    finished: Finished, submit: Submit, gaps: Gaps, longest_gap: Gap | None
) -> RequestRecord:
    """``gaps``: between its tokens; ``longest_gap``: as its reader saw it."""
    p50, p99, longest = gaps.percentiles(0.5, 0.99, 1.0)
    return RequestRecord(
        request_id=finished.request_id,
        reason=finished.reason,
        stopped_by_text=finished.stopped_by_text,
        place=finished.place,
        num_prompt_tokens=finished.num_prompt_tokens,
        num_cached_tokens=finished.num_cached_tokens,
        num_computed_tokens=finished.num_computed_tokens,
        num_generated_tokens=0 if submit.is_silent else finished.num_generated_tokens,
        queue_s=finished.queue_s,
        prefill_s=finished.prefill_s,
        decode_s=finished.decode_s,
        gap_p50_s=p50,
        gap_p99_s=p99,
        gap_max_s=longest,
        gaps_s=gaps.ascending(),
        cache=finished.cache,
        retain=submit.retain,
        adapters=effective(submit.segments[-1].adapters),
        session=submit.session,
        tenant=submit.tenant,
        purpose=submit.purpose,
        num_recalled_tokens=submit.num_recalled_tokens,
        is_copy=submit.is_copy,
        num_recomputed_tokens=finished.num_recomputed_tokens,
        num_preemptions=finished.num_preemptions,
        longest_gap=longest_gap,
    )


def _longest_gap(finished: Finished, handle: Handle) -> Gap | None:
    """Between two tokens as the reader saw them: a reader that does not read is a cause, too."""
    gap = finished.longest_gap
    handle.note_unread()
    if gap is not None and handle.longest_unread_s > gap.seconds:
        return Gap(handle.longest_unread_s, GapCause.READER, 0)
    return gap
