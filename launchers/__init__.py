"""Recipes, the command line, and where jobs run."""
