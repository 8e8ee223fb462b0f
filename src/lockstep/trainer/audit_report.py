"""What an audit found: equalities, and how many values they compared.

Next: `audit_flow.py`, which makes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Check:
    """One equality. `compared` values, of which `different` had other bits; `culprit` names where it began. rows: sampled tokens
    behind it, where the training forward is compared with the rollout."""

    flow: str
    name: str
    compared: int
    different: int
    culprit: str = ""
    rows: int = 0

    @property
    def passed(self) -> bool:
        return self.compared > 0 and self.different == 0

    def line(self) -> str:
        """For people."""
        verdict = "equal" if self.passed else f"{self.different} DIFFER"
        verdict = verdict if self.compared else "NOTHING COMPARED"
        where = f"  <- {self.culprit}" if self.culprit else ""
        return f"{self.flow:14} {self.name:44} {self.compared:10,} values  {verdict}{where}"


@dataclass
class AuditReport:
    """All checks."""

    checks: list[Check] = field(default_factory=list)
    planted: str = ""

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(c.passed for c in self.checks)

    def lines(self) -> list[str]:
        """A table and a verdict."""
        failed = [c for c in self.checks if not c.passed]
        total = sum(c.compared for c in self.checks)
        verdict = f"contract holds: {len(self.checks)} equalities, {total:,} values, no bit differs"
        if failed:
            culprit = next((c.culprit for c in failed if c.culprit), failed[0].name)
            verdict = f"contract BROKEN in {len(failed)} of {len(self.checks)} equalities; first: {culprit}"
        planted = [f"planted violation: {self.planted}"] if self.planted else []
        return [*planted, *(c.line() for c in self.checks), verdict]
