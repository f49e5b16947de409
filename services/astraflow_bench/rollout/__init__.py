"""What rollouts cost: engines side by side, the node around them, swaps of weights, the endpoint for agents."""
