"""A text that would act on whatever shows it as it is, and what a terminal gets instead. Used by tests of screens."""

HOSTILE = "a\x1b]0;owned\x1b\\b\x1b[2Jc\x9b1mé[/b][red]\u202e\u2067b\u2028d"
"""Sets a title, clears the screen, becomes bold, ends markup and begins some, turns around, begins a line."""
PICTURED = "a␛]0;owned␛\\b␛[2Jc\ufffd1mé[/b][red]\ufffd\ufffdb␤d"
