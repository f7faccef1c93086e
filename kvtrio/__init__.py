"""LLM inference server for several users on one machine."""

__version__ = "0.1.0"
