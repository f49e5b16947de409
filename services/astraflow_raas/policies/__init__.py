"""The policies a node serves: their engine, tokenizer and weight versions."""
