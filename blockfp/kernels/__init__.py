"""The compiled kernels: loading and building both libraries, and which product runs how."""
