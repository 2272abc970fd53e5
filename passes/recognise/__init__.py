"""Find every attention by what it computes, and prove it."""
