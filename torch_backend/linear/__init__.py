"""`linear`: three products of quantized operands, by one rank or shared by a tensor-parallel group."""
