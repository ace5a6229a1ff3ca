"""The arrays of a checkpoint: their names, their bits, and whether they are what a target asks for.

A random key is stored as its words, so that Orbax and the sums see integers.
"""

import difflib

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from siamese_jax.checkpoint.seal import Broken
from siamese_jax.errors import InputError


def named(tree):
    """{'parameters/dense/kernel': array, ...} in the order of the tree's leaves; empty states have none."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    result = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    if len(result) < len(leaves):
        raise InputError(f"{len(leaves)} arrays have only {len(result)} names: rename the keys alike")
    return {name: leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf) for name, leaf in result.items()}


def is_random_key(array):
    """Whether `array` (or a ShapeDtypeStruct) is of jax.random.key's type."""
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def entry(array):
    """What about.json says of an array, but for its sum."""
    kind = {"random_key": str(jax.random.key_impl(array))} if is_random_key(array) else {}
    return {"dtype": str(array.dtype), "shape": list(array.shape), **kind}


def words(array):
    """The array as it is stored."""
    return jax.random.key_data(array) if is_random_key(array) else array


def unwords(stored, entry):
    """The array that `words` was given."""
    return jax.random.wrap_key_data(stored, impl=entry["random_key"]) if "random_key" in entry else stored


@jax.jit
def bit_sums(arrays):
    """{name: bit_sum} of all arrays, in one program.

    A program for each array would be dozens in flight at once, more than XLA's CPU client lets a device have, and
    their collectives would wait for each other for ever.
    """
    return {name: bit_sum(array) for name, array in arrays.items()}


def bit_sum(array):
    """The bits of `array` read as 32-bit words and summed modulo 2^32: exact, hence the same on any mesh.

    Words of 8 and 16 bits are widened, 64 bits make two. Any single flipped bit changes the sum.
    """
    if array.dtype == bool:
        array = array.astype(jnp.uint8)
    word = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
    return jnp.sum(jax.lax.bitcast_convert_type(array, word).astype(jnp.uint32), dtype=jnp.uint32)


def compare(step, wanted, table, partial):
    """InputError if the target does not fit the stored arrays: Orbax would cast a dtype without a word."""
    cure = "restore it with the model and optimizer that it was saved with"
    for name, leaf in wanted.items():
        if name not in table:
            near = difflib.get_close_matches(name, table, 1, cutoff=0)
            raise InputError(f"checkpoint {step} has no array {name!r} (nearest: {near}); {cure}")
        stored = f"{table[name]['dtype']}{table[name]['shape']}"
        if stored != (asked := f"{leaf.dtype}{list(leaf.shape)}"):
            raise InputError(f"array {name!r} is {stored} in checkpoint {step}, but {asked} here; {cure}")
    if unasked := [name for name in table if name not in wanted and not partial]:
        raise InputError(
            f"checkpoint {step} has {len(unasked)} arrays that are not here, the first is {unasked[0]!r}; {cure}"
        )


def compare_sums(stored, table):
    """Broken if the restored arrays are not, bit for bit, those that were saved."""
    sums = jax.device_get(bit_sums(stored))
    if altered := [name for name, value in sums.items() if int(value) != table[name]["sum"]]:
        raise Broken(f"{len(altered)} arrays are altered, the first is {altered[0]!r}")


def load(folder, wanted):
    """The stored arrays by name, each with the sharding of its target."""
    shapes = {}
    for name, leaf in wanted.items():
        sharding = getattr(leaf, "sharding", None)
        sharding = sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shape = jax.eval_shape(words, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        shapes[name] = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
    places = ocp.checkpoint_utils.construct_restore_args(shapes)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(folder, args=ocp.args.PyTreeRestore(shapes, places, partial_restore=True))
