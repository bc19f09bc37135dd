"""What can be wrong with an installation rather than with a call."""


class KernelError(RuntimeError):
    """A kernel cannot be compiled or loaded on a device; nothing was computed."""
