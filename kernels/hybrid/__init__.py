"""Hybrid attention: an exact key set plus a linear part, one shared normaliser."""
