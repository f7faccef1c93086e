"""Words for prompts, where a server takes text or where its token ids are to be found out.

The common ones are single tokens, with a space before them, in the vocabularies that we know of
(byte-level BPE and SentencePiece), so that a text of them is cut in the same places whatever
stands beside them.
"""

from collections.abc import Iterable
from itertools import product
from string import ascii_letters, digits, punctuation

from attrs import define, field

COMMON = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an
they which one you were all her she there would their we him been has when who will no more if out
so up said what its about than into them can only other time new some could these two may first then
do any like my now over such our man me even most made after also did many off before must well back
through years where much your way down should because long each just state those people too mr how
little good world make very year still see own work men day get here between old life being both
under last never place same another think house while high right might came off find states since
used give against three himself few part take put head until always away something fact water less
public though set turn end night second why called eyes find going look asked later point next knew
program city business group toward young let room side once present several possible large early
hand face better name best hard line small war form power given light white case whole death days
office family home seemed others open order kind love began change four done general school red
free field church game south north west east morning evening table window book paper letter music
road river sea land tree green blue black brown cold warm heart voice mother father child woman
question answer reason story country town street door floor wall glass stone wood fire air earth
king law court trade market money price cost gold iron ship train car bus plane horse dog cat bird
fish bread milk fruit salt sugar coffee tea wine beer dinner summer winter spring autumn week month
hour minute moment number letter word sentence page line list note sign mark test try learn teach
read write speak hear listen watch show tell ask call send bring carry hold keep leave stay stop
start move walk run drive ride fly fall rise grow build break cut draw play sing dance sleep wake
eat drink cook wash clean buy sell pay save spend win lose meet join help need want hope wish fear
"""
SIGNS = ascii_letters + digits + punctuation
HEADS = ("b", "br", "c", "ch", "d", "dr", "f", "g", "gl", "h", "k", "l", "m", "n", "p", "pl", "r")
HEARTS = ("a", "e", "i", "o", "u", "ai", "ea", "oo")
TAILS = ("n", "r", "st", "ng", "l", "m", "x", "ck")


def common_words() -> tuple[str, ...]:
    """Each once."""
    return tuple(dict.fromkeys(COMMON.split()))


def sample_text() -> str:
    """Ordinary text, some 100,000 characters of it, whose tokens are many and none of them special:
    common words, signs, and made-up words that a tokenizer takes apart."""
    made_up = ("".join(parts) for parts in product(HEADS, HEARTS, TAILS, HEADS[::3], HEARTS[::4]))
    return " ".join((*common_words(), *SIGNS, *made_up))


@define(eq=False)
class WordTable:
    """Texts by number: common words with a space before them, then whatever servers wrote."""

    texts: list[str] = field(factory=lambda: [f" {word}" for word in common_words()])
    _numbers: dict[str, int] = field(init=False, factory=dict)

    def number(self, text: str) -> int:
        """Of a text that is or will be in the table."""
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text]

    def join(self, numbers: Iterable[int]) -> str:
        return "".join(self.texts[number] for number in numbers)
