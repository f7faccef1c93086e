"""Composition root: the command line."""

from kvtrio.cli.app import main

__all__ = ["main"]
