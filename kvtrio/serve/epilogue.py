"""What is done when an answer is complete, before it is told: remember it, explain its reuse."""

from collections.abc import Callable

from attrs import frozen

from kvtrio.model.recall import Recall
from kvtrio.obs.events import CacheDivergence
from kvtrio.obs.words import Section
from kvtrio.serve.choice import Choice
from kvtrio.serve.outline import Place
from kvtrio.serve.served import TextTokenizer

PARTIAL_TOKENS = 1024
"""An answer that its reader left is remembered up to here, on the spot."""


@frozen
class Epilogue:
    """Called beside the event loop, with a choice that nothing else changes meanwhile."""

    recall: Recall | None
    tokenizer: TextTokenizer
    emit: Callable[[CacheDivergence], None]

    def conclude(self, choice: Choice) -> None:
        self.note(choice)
        finished = choice.finished
        assert finished is not None
        report, position = finished.cache, finished.cache.num_matched_tokens
        if not report.is_divergence:
            return
        choice.divergence = place = self._place(choice, position)
        self.emit(
            CacheDivergence(
                request_id=finished.request_id,
                miss_reason=report.reason,
                position=position,
                message_index=place.message_index,
                section=place.section,
            )
        )

    def note(self, choice: Choice) -> None:
        """Remember the answer as far as it got."""
        encoded = choice.encoded
        if self.recall is not None and encoded is not None and choice.token_ids:
            self.recall.note(encoded, choice.token_ids, choice.text)

    def leave(self, choice: Choice) -> None:
        """The reader has gone. Synchronous, on the event loop: so only what is short."""
        if choice.finished is None and len(choice.token_ids) <= PARTIAL_TOKENS:
            self.note(choice)

    def _place(self, choice: Choice, position: int) -> Place:
        outline = choice.job.outline
        if outline is None:
            return Place(Section.PROMPT)
        return outline.place(choice.job.prompts[choice.prompt_index], position, self.tokenizer)
