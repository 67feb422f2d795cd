"""What ranks exchange that is small: they meet, compare and agree; messages between hosts."""
