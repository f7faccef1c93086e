"""``kvtrio.session`` in a request: a saved session is gone on with, and saved where that is wanted.

Nobody's answer fails for it: what cannot be read is computed, what cannot be saved is not, and the
answer says why.
"""

from kvtrio.core.events import Conversation
from kvtrio.core.stored import StoreError, StoreFault
from kvtrio.core.types import Retain
from kvtrio.engine import EngineStopped
from kvtrio.serve.choice import Choice
from kvtrio.serve.errors import CONFLICT, EMPTY_SLOT, NO_SESSION_DIR, STOPPED, ApiError
from kvtrio.serve.job import Job
from kvtrio.serve.session_files import FAULTS, session_error
from kvtrio.serve.session_note import SessionNote
from kvtrio.serve.sessions import NothingThere, Sessions

FEW = 64
"""Tokens that are rather computed than read."""


async def begin_session(sessions: Sessions | None, job: Job) -> SessionNote | None:
    """Before a request is admitted. None: it names no session, or none can be saved here. Raises
    ``ApiError`` for one that could not be saved in any case."""
    named, keeping = job.keeping.named, job.keeping
    if named is None:
        return None
    if named.is_to_be_saved:
        _check(sessions, job)
    if sessions is None:
        return None
    note = SessionNote()
    try:
        if keeping.reuse:
            prompt, owner = job.prompts[0], keeping.owner
            note.num_restored = await sessions.recall(named.name, prompt, owner, FEW)
    except StoreError as error:
        if error.fault is StoreFault.NAME:
            if named.is_to_be_saved:
                raise session_error(error, "kvtrio.session") from None
            return None  # a name for the log only
        note.fault = FAULTS[error.fault]
    except EngineStopped:
        raise ApiError(STOPPED) from None
    return note


def _check(sessions: Sessions | None, job: Job) -> None:
    if sessions is None:
        raise ApiError(NO_SESSION_DIR)
    if job.num_answers > 1:
        raise ApiError(CONFLICT, "kvtrio.save_session", other="n")
    if job.keeping.retain is Retain.AUXILIARY:
        raise ApiError(CONFLICT, "kvtrio.save_session", other="kvtrio.retain")


async def end_session(sessions: Sessions | None, choice: Choice) -> None:
    """When a request's answer is complete."""
    named, note, job = choice.job.keeping.named, choice.session, choice.job
    if sessions is None or named is None or note is None or not named.is_to_be_saved:
        return
    conversation = Conversation(
        token_ids=(*job.prompts[0], *choice.token_ids),
        namespace=job.keeping.namespace,
        segments=job.segments[0],
    )
    try:
        note.num_saved = (
            await sessions.save(named.name, conversation, job.keeping.owner)
        ).num_tokens
    except StoreError as error:
        note.fault = FAULTS[error.fault]
    except NothingThere:
        note.fault = EMPTY_SLOT
    except EngineStopped:
        raise ApiError(STOPPED) from None
