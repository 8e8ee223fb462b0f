"""Metrics, sinks, live progress and the report of a run.

Start at `logger.py` (the object the training loop talks to), then `sinks.py` (what is written), `report.py` (what is
made of it). `metrics.py` reduces micro-batches; `glossary.py` says what each metric means.
"""
