"""What weight versions cost in bytes and CPU, beside other encodings."""
