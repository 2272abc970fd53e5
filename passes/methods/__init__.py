"""Replacement methods, one file each."""
