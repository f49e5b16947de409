"""The weight path: codec, parts, manifests, object stores and the planner; numpy and bytes, never torch."""
