"""What has to be known before a test module imports a framework."""

import os

# However early a module makes JAX look for devices.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
# torch.compile believes the processor, instead of compiling a program for each instruction set that it names.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
