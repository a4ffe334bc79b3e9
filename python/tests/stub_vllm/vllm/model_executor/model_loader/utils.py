from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase


def initialize_model(
    vllm_config: "VllmConfig",
    *,
    prefix: str = "",
    model_class: "type[nn.Module] | None" = None,
    model_config: "ModelConfig | None" = None,
) -> "nn.Module":
    """The test's model, which its configuration makes."""
    return (model_config or vllm_config.model_config).make()


def process_weights_after_loading(model: "nn.Module", model_config: "ModelConfig", target_device: "torch.device") -> None:
    for _, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(module)
