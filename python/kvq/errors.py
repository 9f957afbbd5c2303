"""The exceptions that a user's mistake or an unsuitable machine may raise.

Every one of them carries a message that fits one line and says what was wrong, where, and what
would work. The command line prints that line and exits with code 2; ``--debug`` shows the traceback.
"""


class KvqError(Exception):
    """Base of every error that is the user's to mend, not ours."""


class ConfigError(KvqError):
    """A configuration, option or scheme that is missing, unknown or contradictory."""


class CheckpointError(KvqError):
    """A checkpoint that cannot be read: a missing file, a truncated shard, an absent tensor."""


class CompileError(KvqError):
    """A model, scheme or target that cannot be compiled."""


class LibraryError(KvqError):
    """A compiled library that does not fit the weights, the machine or this version."""


class OutOfMemoryError(KvqError):
    """A memory plan that exceeds its budget; names the largest term and the flag that lowers it."""


class CacheError(KvqError):
    """A request the KV cache cannot serve: no free page, an unknown sequence, a bad length."""


class EngineError(KvqError):
    """An answer that the engine had to end: a step that failed, or a shutdown."""


def check_positive(**options: int) -> None:
    """Refuse an option below 1 with a ConfigError that names it as the command line does."""
    for name, value in options.items():
        if value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} makes no sense: it must be at least 1")
