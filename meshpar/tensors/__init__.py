"""Tensors of which each rank holds a part: which part, digests of them, and what computes with parts."""
