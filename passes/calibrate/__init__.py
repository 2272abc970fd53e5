"""Measure on real activations what a replacement would cost in accuracy."""
