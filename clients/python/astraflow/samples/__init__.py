"""Samples of an archive, as the command and the dashboard show and export them."""
