"""Speed bars: ``python -m tests.benchmarks [--only kernels] [--quick]`` prints one table."""
