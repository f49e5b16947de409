"""The CPU inference server that speaks the part of the SGLang HTTP API which rollout nodes use."""
