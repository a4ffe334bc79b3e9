def is_deferred_attention_layer(layer: "torch.nn.Module") -> bool:
    """A layer that makes tensors when its weights are processed, and has no quantisation method."""
    return hasattr(layer, "is_attention")
