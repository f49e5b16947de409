"""What a person sees of a run: live screen, curves, summary, metrics file."""
