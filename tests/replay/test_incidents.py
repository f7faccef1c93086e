"""The library of incidents, on a server that does it right."""

from typing import Any

import pytest

from harness.replaying import play
from harness.source_tree import ROOT
from harness.virtual import SimSettings
from kvtrio.replay.incidents import INCIDENTS
from kvtrio.replay.pacing import PlaySettings
from kvtrio.replay.results import Outcome, Pacing
from kvtrio.replay.scenario_file import checked, collect, encode_line
from kvtrio.schedulers.stall_free import StallFree

OPEN = PlaySettings(pacing=Pacing.OPEN)


@pytest.mark.parametrize("name", INCIDENTS)
def test_the_files_are_what_the_library_writes(name: str) -> None:
    """A change of a story changes its file, and every one keeps the rules of the format."""
    lines = list(checked(INCIDENTS[name]()))
    file = ROOT / "scenarios" / f"{name}.jsonl"
    assert file.read_bytes() == b"".join(map(encode_line, lines))


@pytest.mark.slow
@pytest.mark.parametrize("name", INCIDENTS)
async def test_what_an_incident_expects_comes_true(autojump_clock: Any, name: str) -> None:
    """Except where nobody can save, restart and restore."""
    story = collect(checked(INCIDENTS[name]()))
    sim = SimSettings(
        num_places=story.header.num_places or 1,
        max_context=story.header.max_context,
        max_batch_tokens=512,
        block_size=16,
        num_host_blocks=8192,
        policy=StallFree(),
        is_paranoid=False,
    )
    played = await play(story, sim, OPEN, adapters=len(story.adapters))
    assert {each.outcome for each in played.results} == {Outcome.DONE}
    assert played.verdicts
    expected = {None} if name == "save-restart-resume" else {True}
    assert {each.is_met for each in played.verdicts} == expected
