"""The async shell around the core: step loop, executors, handles."""
