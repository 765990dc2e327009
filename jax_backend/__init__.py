"""The JAX backend. Its public names are those of `blockfp.jax`."""

try:
    import jax
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ModuleNotFoundError("blockfp.jax needs JAX: pip install 'blockfp[jax]'", name="jax") from error

OLDEST = 0, 10, 2

if jax.__version_info__ < OLDEST:
    raise ImportError(f"blockfp.jax needs JAX {'.'.join(map(str, OLDEST))} or later, got {jax.__version__}")

try:
    from .implementations import carriers  # noqa: F401
except (AttributeError, ImportError, KeyError) as error:
    raise ImportError(
        f"blockfp.jax uses private parts of JAX, and JAX {jax.__version__} has others ({error}): "
        "install a newer blockfp, or an older JAX"
    ) from error
