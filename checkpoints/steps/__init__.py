"""Steps of a run: save, commit, find, verify, retain and restore them."""
