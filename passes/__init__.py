"""Graph to graph: canonicalise, recognise, raise, replace."""
