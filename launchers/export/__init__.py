"""What a run gives away: a folder that transformers or peft loads."""
