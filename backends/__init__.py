"""Backends: the forward pass and the memory behind it."""
