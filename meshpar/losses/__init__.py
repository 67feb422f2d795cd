"""Token losses and log-probabilities, also where the vocabulary is split."""
