"""`QuantizedTensor`: the tensor subclass, its operations, its shards' positions, and FSDP2's gather."""

# Importing these registers the operations in the op table.
from . import optable as optable
from . import own_ops as own_ops
