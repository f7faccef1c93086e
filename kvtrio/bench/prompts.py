"""Prompts: plain English words, the same in every run, no two with the same beginning."""

from random import Random

TEXT = (
    "the of and to in is that it was for on are as with they at be this from have or by one had "
    "not but what all were when we there can an your which their said if do will each about how "
    "up out them then she many some so these would other into has more her two like him see time "
    "could no make than first been its who now people my made over did down only way find use may "
    "water long little very after words called just where most know river mountain garden letter "
    "music window winter island teacher engine forest market bridge silver kitchen history"
)
WORDS = TEXT.split()
SENTENCE = 12
"""Words."""


def text(label: str, num_words: int) -> str:
    """The text of that label; differs from every other one from its first words on."""
    rng = Random(label)
    sentences = (" ".join(rng.choices(WORDS, k=SENTENCE)) for _ in range(num_words // SENTENCE + 1))
    return f"{label}. " + " ".join(f"{each.capitalize()}." for each in sentences)
