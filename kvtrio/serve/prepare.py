"""From a body's bytes to a ``Job``, per route. Pure; slow enough to run beside the event loop."""

from functools import partial

from attrs import evolve, frozen

from kvtrio.model.matcher import PieceDecoder, TextMatcher
from kvtrio.model.recall import Recall
from kvtrio.serve.adapters import scales_of
from kvtrio.serve.alignment import Alignment
from kvtrio.serve.bounds import Bounds
from kvtrio.serve.chat import chat_outline
from kvtrio.serve.errors import NEEDS, OUT_OF_RANGE, TOO_MANY_CELLS, ApiError
from kvtrio.serve.job import Job, Keeping, Wants
from kvtrio.serve.keeping import Asker, keeping
from kvtrio.serve.message_ends import message_ends
from kvtrio.serve.prompts import Prompt, Reader, TokenIds, read_prompts
from kvtrio.serve.queueing import queueing
from kvtrio.serve.sampling import (
    is_seeded,
    max_new_tokens,
    num_answers,
    sampling_params,
    stop_strings,
)
from kvtrio.serve.schema import (
    MAX_CELLS,
    MAX_TOP_LOGPROBS,
    ChatBody,
    GenerationBody,
    NativeBody,
    TextBody,
    parse,
)
from kvtrio.serve.served import ServedModel
from kvtrio.serve.services import ServeSettings
from kvtrio.serve.spans import answer_spans

OF_CHATS, OF_TEXTS = b"chat", b"text"
"""Added to a tenant's namespace: who writes a raw prompt can put anything before an answer, so that
recalling one in a chat, or the other way round, would let them tokenise parts of others' chats."""


@frozen
class Preparer:
    """Makes jobs; every method raises ``ApiError`` and touches nothing but its arguments."""

    model: ServedModel
    settings: ServeSettings
    recall: Recall | None
    bounds: Bounds

    def native(self, raw: bytes, asker: Asker) -> Job:
        """POST /completion."""
        body = parse(raw, NativeBody, self.bounds.max_values)
        kept = keeping(body, asker, self.settings)
        prompts = read_prompts(body.prompt, self._reader(kept, OF_TEXTS))
        num_probs = body.n_probs or body.logprobs or None
        job = self._job(body, prompts, num_probs, asker)
        wants = evolve(job.wants, response_fields=tuple(body.response_fields or ()))
        texts = tuple(self.model.tokenizer.decode(prompt.ids) for prompt in prompts)
        return evolve(job, wants=wants, prompt_texts=texts, keeping=kept)

    def text(self, raw: bytes, asker: Asker) -> Job:
        """POST /v1/completions. ``logprobs: 0`` tells the chosen tokens' own."""
        return self.text_job(parse(raw, TextBody, self.bounds.max_values), asker)

    def text_job(self, body: TextBody, asker: Asker) -> Job:
        kept = keeping(body, asker, self.settings)
        prompts = read_prompts(body.prompt, self._reader(kept, OF_TEXTS))
        job = self._job(body, prompts, body.n_probs or body.logprobs, asker)
        return evolve(job, keeping=kept)

    def chat(self, raw: bytes, asker: Asker) -> Job:
        """POST /v1/chat/completions."""
        return self.chat_job(parse(raw, ChatBody, self.bounds.max_values), asker)

    def chat_job(self, body: ChatBody, asker: Asker) -> Job:
        kept, num_probs = keeping(body, asker, self.settings), _num_chat_logprobs(body)
        outline = chat_outline(body, self.model, self.settings.clock())
        reader = self._reader(kept, OF_CHATS)
        prompt = reader.whole(outline.text, "messages", partial(answer_spans, outline))
        job = self._job(body, (prompt,), num_probs, asker)
        job = evolve(job, prompt_field="messages", keeping=kept, outline=outline)
        if self.model.spec.resumes_anywhere:
            return job
        return evolve(job, message_ends=message_ends(prompt.ids, self.model.tokenizer))

    def _reader(self, kept: Keeping, kind: bytes) -> Reader:
        recall = self.recall if kept.reuse else None
        return Reader(self.model.tokenizer, recall, kept.namespace + kind, self.bounds)

    def _job(
        self, body: GenerationBody, read: tuple[Prompt, ...], num_probs: int | None, asker: Asker
    ) -> Job:
        tokenizer, prompts = self.model.tokenizer, tuple(prompt.ids for prompt in read)
        sampling = sampling_params(body, self.settings.sampling, tokenizer, asker.seed)
        n, stops = self._checked_n(body), stop_strings(body)
        self._check_cells(body, prompts, n, num_probs)
        # Where nothing is written, nothing that was written ends it.
        is_silent = max_new_tokens(body) == 0
        matched = () if is_silent else stops
        return Job(
            prompts=prompts,
            prompt_field="prompt",
            n=n,
            max_new_tokens=max_new_tokens(body),
            sampling=evolve(sampling, num_logprobs=num_probs),
            is_seeded=is_seeded(body),
            ignore_eos=bool(body.ignore_eos),
            eos_ids=frozenset() if body.ignore_eos or is_silent else tokenizer.eog_ids,
            stops=stops,
            matchers=tuple(TextMatcher(tokenizer, matched) for _ in range(len(prompts) * n)),
            alignments=() if num_probs is None else self._alignments(len(prompts) * n),
            place=self._checked_place(body),
            wants=_wants(body),
            encoded=tuple(prompt.encoded for prompt in read),
            is_forced=bool(body.logit_bias),
            lora=None if body.lora is None else scales_of((e.id, e.scale) for e in body.lora),
            model_name=body.model,
            queueing=queueing(body, asker, self.settings),
        )

    def _alignments(self, number: int) -> tuple[Alignment, ...]:
        return tuple(Alignment(PieceDecoder(self.model.tokenizer)) for _ in range(number))

    def _check_cells(
        self, body: GenerationBody, prompts: tuple[TokenIds, ...], n: int, num_probs: int | None
    ) -> None:
        limit = max_new_tokens(body)
        longest = self.settings.n_ctx if limit is None else min(limit, self.settings.n_ctx)
        if len(prompts) * n * longest * (num_probs or 0) > MAX_CELLS:
            raise ApiError(TOO_MANY_CELLS, "logprobs", limit=MAX_CELLS)

    def _checked_n(self, body: GenerationBody) -> int:
        number, high = num_answers(body), self.settings.num_places
        if number > high:
            raise ApiError(OUT_OF_RANGE, "n", low=1, high=high)
        return number

    def _checked_place(self, body: GenerationBody) -> int | None:
        place, high = body.id_slot, self.settings.num_places - 1
        if place is None or place == -1:
            return None
        if place > high:
            raise ApiError(OUT_OF_RANGE, "id_slot", low=-1, high=high)
        return place


def _num_chat_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return MAX_TOP_LOGPROBS if body.top_logprobs is None else body.top_logprobs
    if body.top_logprobs:
        raise ApiError(NEEDS, "top_logprobs", other="logprobs")
    return body.n_probs or None


def _wants(body: GenerationBody) -> Wants:
    options, ping_s = body.stream_options, body.sse_ping_interval
    return Wants(
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        tokens=bool(body.return_tokens),
        progress=bool(body.return_progress),
        timings_per_token=bool(body.timings_per_token),
        # Never off: a write is what shows that a client has left.
        heartbeat_s=float(ping_s) if ping_s is not None and ping_s > 0 else None,
    )
