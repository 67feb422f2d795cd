"""``meshpar doctor``: check machines and network before training."""
