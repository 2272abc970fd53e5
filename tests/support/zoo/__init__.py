"""Small random models of every family, exported in every way, and what becomes of them."""
