"""Sans-IO heart of the server: data and decisions. Standard library and attrs only."""
