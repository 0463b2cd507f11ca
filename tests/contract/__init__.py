"""The same cases on the simulated engine and on real vLLM."""
