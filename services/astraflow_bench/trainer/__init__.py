"""What a training step costs: packing, logits, losses, ranks, publishing, and where its time goes."""
