"""Measuring the kernels on this machine: shapes, timing, results, and the self-test that `lockstep doctor` runs.

Start with `shapes.py`; `gemm.py`, `quant.py` and `attention.py` are the benchmarks, `kernels_check.py` is the comparison with
the reference.
"""
