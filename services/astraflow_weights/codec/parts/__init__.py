"""The file format of a part: written, read, checked."""
