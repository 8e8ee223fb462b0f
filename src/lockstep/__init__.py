"""Lockstep: reinforcement learning of language models in FP8, with rollout and trainer equal bit for bit.

Start at `cli/train.py`, then `trainer/loop.py`.
"""

__version__ = "0.1.0"
