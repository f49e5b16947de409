"""After rollout: pushed episodes are checked and committed, complete groups settled."""
