"""Pieces of CPU kernels, as Python functions that emit TVM TIR through its IRBuilder.

They are plain functions over expressions, so operators compose them instead of copying loops.
Import this package only where TVM may be imported: it takes seconds.
"""
