from abc import ABC


class QuantizeMethodBase(ABC):
    supports_pre_processed_weights: bool = False

    def process_weights_after_loading(self, layer: "nn.Module") -> None:
        pass
