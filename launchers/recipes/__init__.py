"""Recipes: what a run is made of, as strict YAML; those that come with the package stand beside the code."""
