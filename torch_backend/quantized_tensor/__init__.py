"""`QuantizedTensor`: the tensor subclass, the operations it answers, where its rows lie, and what FSDP2 gathers of it."""
