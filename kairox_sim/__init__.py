"""Decide and simulate: traces, policies, the cache, the discrete-event engine. Imports no torch."""
