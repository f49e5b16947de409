"""One optimizer step: advantages, loss, gradients."""
