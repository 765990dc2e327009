"""The CUDA library's optimizer steps and updates of scales."""
