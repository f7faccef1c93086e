"""Logs, metrics and instruments."""
