"""Tensors and their checksums in the files of a step, and in files of other programs."""
