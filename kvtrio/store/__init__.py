"""State in files: the disk tier and saved sessions. Synchronous, without a clock of its own."""
