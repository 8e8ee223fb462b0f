"""YAML and command line in, `RunSpec` out. Start at `load.py`."""
