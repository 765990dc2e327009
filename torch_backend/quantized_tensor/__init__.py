"""`QuantizedTensor`: the tensor subclass, the operations it answers, where its rows lie, and what FSDP2 gathers of it."""

# The operations enter the table that the tensor looks them up in when these are imported.
from . import optable as optable
from . import own_ops as own_ops
