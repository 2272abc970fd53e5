"""Exact attention over listed blocks of keys."""
