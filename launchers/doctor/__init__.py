"""What is wrong with the machines, found before training does."""
