"""Reaching a server: how it and its caller prove who they are, and whether both understand each other."""
