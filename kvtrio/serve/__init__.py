"""HTTP: parse, submit, stream."""
