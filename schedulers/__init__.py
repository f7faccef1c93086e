"""Scheduling policies, one flat file each."""
