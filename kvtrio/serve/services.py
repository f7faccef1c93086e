"""Everything a request needs, handed in once; routes reach nothing else."""

from collections.abc import Callable

from attrs import field, frozen

from kvtrio.core.sampling import SamplingParams
from kvtrio.engine import Engine
from kvtrio.engine.offload import Offload
from kvtrio.model.recall import Recall
from kvtrio.obs.identity import Sealer
from kvtrio.obs.tally import Tally
from kvtrio.serve.adapter_loading import AdapterLoader
from kvtrio.serve.served import ServedModel
from kvtrio.serve.sessions import Sessions

PURPOSES = ("chat", "title", "recap", "probe", "tool")
"""What a request may say it is for, unless the operator declares others."""

MAX_BODY_BYTES = 16 << 20
BASE_BODY_BYTES = 2 << 20
BODY_BYTES_PER_TOKEN = 32


@frozen(kw_only=True)
class ServeSettings:
    """Fixed at start. Times in seconds."""

    n_ctx: int
    """Longest request, prompt and answer together, in tokens."""
    num_places: int
    clock: Callable[[], float]
    """Unix time, for ``created``."""
    new_id: Callable[[], str]
    """32 characters, fresh each time, for the ids of answers and chunks."""
    new_seed: Callable[[], int]
    """For requests that bring none."""
    api_keys: tuple[str, ...] = ()
    """Any of them opens the API; none: it is open."""
    sampling: SamplingParams = field(factory=SamplingParams)
    """What a request gets that says nothing; llama-server's defaults."""
    heartbeat_s: float = 5.0
    """A stream that is silent for so long gets a comment: it keeps proxies patient, and a write is
    what shows that a client has left."""
    sealer: Sealer
    block_size: int
    """Tokens per block of state."""
    purposes: tuple[str, ...] = PURPOSES
    max_waiting_s: float | None = None
    """A request that did not start by then is refused, if it sets no earlier time; None: never."""
    reuse_notes: tuple[str, ...] = ()
    """What the model or the settings keep from being reused; ours, to be shown."""
    max_body_bytes: int = field()
    """By default enough for a context of any text in any notation, but at most 16 MiB."""
    body_timeout_s: float = 60.0

    @max_body_bytes.default
    def _body_for_context(self) -> int:
        return min(MAX_BODY_BYTES, BASE_BODY_BYTES + BODY_BYTES_PER_TOKEN * self.n_ctx)


@frozen(kw_only=True)
class Services:
    """The engine, the model and the settings behind one application."""

    engine: Engine
    model: ServedModel
    offload: Offload
    settings: ServeSettings
    loader: AdapterLoader
    sessions: Sessions | None = None
    """None: conversations are not saved."""
    recall: Recall | None
    """None: generated ids are not kept."""
    tally: Tally
    """Fed by the engine; what /metrics shows."""
    emit: Callable[[object], None]
    """Writes a log line."""
