"""The asynchronous shell around the core: step loop, model thread, handles."""

from kvtrio.engine.group import HandleGroup
from kvtrio.engine.handle import EngineStopped, Handle, Refused
from kvtrio.engine.open import Engine, open_engine

__all__ = ["Engine", "EngineStopped", "Handle", "HandleGroup", "Refused", "open_engine"]
