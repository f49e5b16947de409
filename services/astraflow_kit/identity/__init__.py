"""Who calls, how it is proved, and what a caller may do: tokens, their keys, certificates, the gate before each rpc."""
