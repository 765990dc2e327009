"""`convert`: a model's modules become quantized layers; summaries and sensitivities of models."""
