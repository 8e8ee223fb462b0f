"""Every error a user can cause, as one clear line: what, where, why, what to do.

`UserError` and its children are shown without a traceback and end the process with exit code 2. `ContractError` says
that the exactness contract did not hold; it ends the process with exit code 3, since it is never the user's typo.
"""

from __future__ import annotations


class UserError(Exception):
    """A mistake in what the user brought: configuration, data, reward function, checkpoint, machine.

    `where` is a path (file, config key, line), `why` the rule that was broken, `fix` what to do about it.
    """

    exit_code = 2
    kind = ""

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        self.what, self.where, self.why, self.fix = what, where, why, fix
        super().__init__(self.line())

    def line(self) -> str:
        """The whole message on one line."""
        text = f"{self.where}: {self.what}" if self.where else self.what
        if self.why:
            text += f" ({self.why})"
        if self.fix:
            text += f" -> {self.fix}"
        return " ".join(text.split())


class ConfigError(UserError):
    """A configuration value, key or file."""

    kind = "config"


class DataError(UserError):
    """A dataset, a row of it, or a prompt."""

    kind = "data"


class RewardError(UserError):
    """A reward function, its signature or what it returned."""

    kind = "reward"


class CheckpointError(UserError):
    """A checkpoint or model folder that can't be read, or doesn't match."""

    kind = "checkpoint"


class CapacityError(UserError):
    """A request that can never fit into the memory given."""

    kind = "capacity"


class JobError(UserError):
    """One of several processes ended, and this one can't go on without it."""

    kind = "job"


class ContractError(Exception):
    """Rollout and trainer disagreed where the flow promises equality, or a published weight is not what it should be."""

    exit_code = 3
    kind = "contract"
