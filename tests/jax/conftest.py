"""Eight host devices for shard_map, asked for before any test makes JAX start its CPU backend."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
