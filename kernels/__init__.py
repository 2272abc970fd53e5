"""The operators of ``ai.subquad``: semantics, float64 references, kernels."""
