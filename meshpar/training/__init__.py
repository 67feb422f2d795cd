"""What a training job needs around a model: text, tokens, batches, objectives, schedules, metrics and the loop."""
