"""What stands in the process that holds vLLM's weights: taking over all of a policy's, and telling whose they are.

It is mixed into vLLM's worker (``worker_extension_cls``) and runs in the environment of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module

CLASS = f"{__name__}.TakesOverWeights"
# Of a config.json: what has no effect on the probabilities of a trained policy's tokens.
NO_EFFECT = {
    "_attn_implementation",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


class TakesOverWeights:
    """Draws with other weights from one call on, without a restart."""

    # The worker's own.
    reload_weights: Callable[..., None]
    get_model: Callable[[], Module]
    model_config: Any

    held: str | None = None

    def take_over(
        self,
        weights: str,
        weights_path: str | None = None,
        weights_iterator: Iterator[tuple[str, Tensor]] | None = None,
    ) -> None:
        """Load weights by the names that a policy folder has.

        Args:
            weights: what they are called from here on.
            weights_path: a folder with them, for an engine in a process of its own.
            weights_iterator: name and weight, for one in this process.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        self.held = None
        self.reload_weights(weights_path=weights_path, weights_iterator=weights_iterator)
        # On a processor an output layer that is tied to the embedding multiplies by a rearranged copy, which vLLM
        # 0.32 makes once and leaves as it was ("ParallelLMHead: Failed to load weights" in its log).
        for layer in self.get_model().modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)
        self.held = weights

    def weights_held(self) -> str | None:
        """What the weights are called that were loaded last; None where that failed, or none were."""
        return self.held

    def differing_settings(self, policy: str) -> list[str]:
        """Keys in which the config.json of a policy folder is another than that of the model served here.

        Told rather than raised: of an error vLLM's server passes on no word.
        """
        from vllm.transformers_utils.config import get_config

        handed = get_config(policy, trust_remote_code=self.model_config.trust_remote_code)
        return differing(self.model_config.hf_config.to_dict(), handed.to_dict())


def differing(served: Mapping[str, Any], handed: Mapping[str, Any]) -> list[str]:
    """Keys of ``handed`` that have an effect and another value in ``served``, to which vLLM may have added its own."""
    return sorted(key for key in handed.keys() - NO_EFFECT if served.get(key) != handed[key])
