"""Small exchanges of ranks, which meet, compare and agree, and messages between hosts."""
