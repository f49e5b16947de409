"""What an operator issues: a development authority and its certificates, the keys that sign tokens, and tokens."""
