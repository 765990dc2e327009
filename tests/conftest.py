"""JAX shows eight CPU devices, however early a test module makes it look for devices."""

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
