"""The process and its machine: homes, leftovers, signals, imports."""
