"""The patch engine's errors. None is an ImportError, so that no `except ImportError` upstream swallows it."""


class OverlayError(RuntimeError):
    """Base of every error of the patch engine."""


class DeclarationError(OverlayError):
    """A patch is declared wrongly: a malformed target, or metadata that is missing."""


class ConflictError(OverlayError):
    """Two or more declared patches cannot be applied together; raised before anything is changed."""


class TargetError(OverlayError):
    """A patch's target does not exist, or is not what the patch's kind asks for."""


class DriftError(TargetError):
    """Upstream's source is none of the supported ones where a patch depends on it."""


class EffectiveError(OverlayError):
    """A patch that should be in use is not what is really called."""


class SettingsError(OverlayError, ValueError):
    """A key of the configuration is unknown or holds a value of the wrong kind; the message names the full key."""


class ConfigurationError(OverlayError, ValueError):
    """A combination of values cannot run; the message says which keys, why, and what to change."""
