"""``kvtrio fetch``: bring a model that everybody can get."""

from typing import Annotated

from cyclopts import Parameter

from kvtrio.cli import exits
from kvtrio.cli.signals import Stop, stop_signals


def fetch(name: Annotated[str, Parameter(help="smollm2 or gemma3-270m.")], /) -> int:
    """Download a model into the cache folder and print its path.

    The cache folder is $KVTRIO_CACHE, else ~/.cache/kvtrio. A model that is there is not
    downloaded again, but its checksum is verified.
    """
    from kvtrio.model import fetch as models

    try:
        with stop_signals(Stop.UNWIND):
            path = models.fetch(name, models.default_cache_dir(), progress=True)
    except models.FetchError as error:
        exits.complain(error)
        return exits.USAGE
    print(path)
    return exits.OK
