"""`astraflow weights`: what people ask of stored versions."""
