"""Caching policies: what to promote and what to evict."""
