"""Prefill of vLLM by sparge."""
