"""A step of a parallel module: its calls, its backward, and what happens around them."""
