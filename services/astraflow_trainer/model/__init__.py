"""The model and all state that a checkpoint holds: weights, optimizer, layout, tokenizer."""
