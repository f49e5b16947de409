"""Benchmarks, experiments and studies: what measures the product, and nothing that the product needs."""
