"""The processes of one trainer: how they start, watch each other and reduce."""
