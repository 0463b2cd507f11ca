"""The simulated engine: the wire behaviour of vLLM, with tokens that anybody can recompute."""
