"""Which parts nobody needs any more, and the rounds in which they are deleted."""
