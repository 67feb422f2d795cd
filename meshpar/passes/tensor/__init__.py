"""Tensor parallelism: the pass, its styles, and the collectives that they share."""
