"""Give back some of the accuracy that replacements cost."""
