"""What a plan will cost before anything is launched: bytes, collectives, step time."""
