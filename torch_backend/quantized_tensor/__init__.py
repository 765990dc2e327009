"""`QuantizedTensor`: the tensor subclass, the operations it answers, where its rows lie, and what FSDP2 gathers of it."""

# Importing these registers the operations in the op table.
from . import optable as optable
from . import own_ops as own_ops
