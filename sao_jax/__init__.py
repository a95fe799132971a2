"""Asynchronous reinforcement learning for agentic language models in JAX."""

__version__ = "0.1.0"
