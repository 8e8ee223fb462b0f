"""Hopper kernels in Triton, one file an operation. `../hopper.py` puts them behind the table's interface."""
