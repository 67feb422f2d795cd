"""How tensors and their checksums lie in the files of a step, and in files of other programs."""
