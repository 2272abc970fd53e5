"""Tuning records that come with the package, one file per target; see ``docs/tuning.md``."""
