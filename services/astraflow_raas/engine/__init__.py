"""The seam to the inference engine: a Protocol, an HTTP client for SGLang's API, a child process."""
