"""A training job inside one rank: built from its recipe, trained, saved."""
