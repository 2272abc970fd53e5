"""Hybrid attention step by step: a state of fixed size instead of a cache that grows."""
