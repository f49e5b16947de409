"""Studies of pools that change their size, or differ in speed and region."""
