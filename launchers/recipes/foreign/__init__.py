"""Recipes written for other trainers, in meshpar's terms."""
