"""The definition of every format: what each bit of codes and scales is, on any array library."""
