"""Positions of one sequence on several ranks."""
