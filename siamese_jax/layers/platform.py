"""Which hardware a program is traced for: the one place where layers choose between forms of one computation."""

import contextlib
import contextvars

import jax

_target = contextvars.ContextVar("siamese_jax_target_platform", default=None)


def target_platform() -> str:
    """'cpu', 'gpu' or 'tpu': the default backend, unless `compiling_for` says otherwise."""
    return _target.get() or jax.default_backend()


@contextlib.contextmanager
def compiling_for(platform: str):
    """Trace for `platform` inside the block: for ahead-of-time compiles of hardware that is not here."""
    token = _target.set(platform)
    try:
        yield
    finally:
        _target.reset(token)
