"""The weights of step 0: read from a hub, or taught from demonstrations and cached."""
