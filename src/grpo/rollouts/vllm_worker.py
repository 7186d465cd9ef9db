"""What stands in the process that holds vLLM's weights: taking over a policy's, all of them.

It is mixed into vLLM's worker (``worker_extension_cls``) and runs in the environment of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor
from torch.nn import Module

CLASS = f"{__name__}.TakesOverWeights"


class TakesOverWeights:
    """Draws with other weights from one call on, without a restart."""

    # The worker's own.
    reload_weights: Callable[..., None]
    get_model: Callable[[], Module]

    def take_over(
        self, weights_path: str | None = None, weights_iterator: Iterator[tuple[str, Tensor]] | None = None
    ) -> None:
        """Load weights by the names that a policy folder has.

        Args:
            weights_path: a folder with them, for an engine in a process of its own.
            weights_iterator: name and weight, for one in this process.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        self.reload_weights(weights_path=weights_path, weights_iterator=weights_iterator)
        # On a processor an output layer that is tied to the embedding multiplies by a rearranged copy, which vLLM
        # 0.32 makes once and leaves as it was ("ParallelLMHead: Failed to load weights" in its log).
        for layer in self.get_model().modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)
