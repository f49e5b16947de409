"""From committed weights to a published version: what changed, and who publishes it."""
