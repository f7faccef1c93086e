"""What is in a scenario, in a few lines."""

from collections import Counter
from collections.abc import Iterator

from kvtrio.replay.scenario import Block, Fresh, Ref
from kvtrio.replay.scenario_file import Scenario


def outline(scenario: Scenario) -> Iterator[str]:
    header, requests = scenario.header, scenario.requests
    sessions = {each.session for each in requests if each.session is not None}
    span_s = requests[-1].at_s if requests else 0.0
    yield (
        f"{header.origin.value}: {len(requests):,} requests, {len(sessions):,} sessions,"
        f" {len(scenario.adapters)} adapters, in {span_s:,.0f} s"
    )
    num_prompt = sum(each.prompt_tokens for each in requests)
    longest = max((each.prompt_tokens + each.output_tokens for each in requests), default=0)
    num_output = sum(each.output_tokens for each in requests)
    yield (f"prompts: {num_prompt:,} tokens; answers: {num_output:,}; longest request: {longest:,}")
    places = f"; places: {header.num_places}" if header.num_places else ""
    yield f"needs: room for {header.max_context:,} tokens in a request{places}"
    lengths: Counter[type] = Counter()
    for request in requests:
        for piece in request.prompt:
            lengths[type(piece)] += piece.length
    if num_prompt:
        names = {Ref: "seen before", Fresh: "new", Block: "in blocks"}
        shares = (
            f"{100 * lengths[kind] / num_prompt:.1f} % {name}" for kind, name in names.items()
        )
        yield f"of the prompts: {', '.join(shares)}"
    if not header.is_exact:
        yield "what prompts have in common is a guess: the source does not say it"
    if scenario.actions or scenario.expects:
        yield f"{len(scenario.actions)} actions, {len(scenario.expects)} expectations"
