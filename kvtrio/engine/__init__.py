"""The asynchronous shell around the core: step loop, model thread, handles."""
