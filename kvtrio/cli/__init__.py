"""Composition root: the command line."""
