"""Dense (exact softmax) attention."""
