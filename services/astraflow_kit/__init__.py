"""The kit every daemon is built with: settings, servers, lifecycle, logs, metrics, plug-ins, failpoints.

It knows nothing of tasks, batches or weights, so a daemon's own modules stay free of plumbing.
Daemons import it; it imports only the public package `astraflow`.
"""
