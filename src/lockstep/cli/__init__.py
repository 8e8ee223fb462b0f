"""The `lockstep` command. Start at `main.py`."""
