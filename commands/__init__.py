"""The commands of ``subquad``: small functions that import what they need when they run."""
