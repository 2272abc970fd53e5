"""Run a graph in torch, with gradients: for distillation and low-rank repair."""
