"""The PyTorch backend. Its public names are those of `blockfp.torch`."""
