"""A model's weights as they are served: as they are stored, or quantised on the way in."""

import kvtrio
from kvtrio.cli import exits
from kvtrio.model.digest import content_digest
from kvtrio.model.fetch import default_cache_dir
from kvtrio.model.model_file import ModelFile
from kvtrio.model.quantise import QuantisedFile, Wanted, quantised, quantised_digest
from kvtrio.model.quantised_cache import kept_or_made

NOT_KEPT = "--quantize: nothing is kept in the cache folder ({}), so each start quantises again"


def as_wanted(source: ModelFile, wanted: Wanted | None) -> ModelFile:
    """The file to load from; nothing is computed yet. Raises ModelFileError."""
    return source if wanted is None else quantised(source, wanted)


def weights_of(file: ModelFile, wanted: Wanted | None) -> tuple[ModelFile, bytes]:
    """What ``as_wanted`` gave, over the bytes in the cache folder if it is quantised; and the
    digest that the weights are known by.

    Says in one line on stderr if what was quantised could not be kept. Raises ModelFileError.
    """
    content = content_digest(file.part_paths)
    if wanted is None or not isinstance(file, QuantisedFile):
        return file, content
    digest = quantised_digest(content, wanted)
    kept = kept_or_made(file, digest, default_cache_dir(), kvtrio.__version__)
    if kept.problem is not None:
        exits.complain(NOT_KEPT.format(kept.problem))
    return kept.file, digest
