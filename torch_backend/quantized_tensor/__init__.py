"""`QuantizedTensor`: the tensor subclass, the operations it answers, where its rows lie, and what FSDP2 gathers of it."""

# The operations that fill a parameter enter the op table when they are imported.
from . import filling as filling
