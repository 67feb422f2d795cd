"""``meshpar export``: write a run's model as a folder that transformers or peft loads."""
