"""How a GPU step's hidden states become tokens: from the logits of the whole vocabulary, or of this
rank's part. In: residual stream, what was staged for the rows. Out: logits, tokens and log-probs.

Tensor ranks gather their logits, unless `engine.sharded_sampling` says otherwise."""

# N rows that choose, R rows of the engine, E hidden size, V vocabulary or this rank's part

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from gyre.engine.sampling.shard_sampler import ShardSampler
from gyre.kernels.gpu.sample import SampleScratch, sample
from gyre.kernels.gpu.sample_shard import ShardScratch, sample_shard
from gyre.models.decoder import Decoder
from gyre.models.fused_forward import FusedForward


class WholeSampling:
    """Every rank has all logits."""

    def __init__(self, decoder: Decoder, forward: FusedForward, *, max_running: int) -> None:
        self.width = decoder.whole_spec.vocab_size  # columns of the logits
        self._forward = forward
        self._scratch = SampleScratch.make(max_running, self.width, decoder.device)

    def logits(self, x_NE: Tensor) -> Tensor:
        """Return logits_NV of rows of the residual stream, in the compute dtype."""
        return self._forward.logits(x_NE)

    def sample(
        self,
        logits_NV: Tensor,
        staged: Mapping[str, Tensor],
        last_R: Tensor,
        token_N: Tensor,
        logprobs_2N: Tensor,
    ) -> None:
        """Choose for the staged rows, which ask for no more than a temperature."""
        count = len(logits_NV)
        sample(
            logits_NV,
            staged["inverse"][:count],
            staged["uniform"][:count],
            self._scratch,
            staged["row"][:count],
            last_R,
            token_N,
            logprobs_2N,
        )


class ShardSampling:
    """Each rank has the logits of its part, and all choose together."""

    def __init__(
        self, decoder: Decoder, forward: FusedForward, *, max_running: int, sharded: ShardSampler
    ) -> None:
        self.width = sharded.shard.width
        self._forward = forward
        self._group = sharded.shard.group
        self._scratch = ShardScratch.make(
            max_running,
            sharded.shard.vocab_size,
            self._group.rank,
            self._group.size,
            decoder.device,
        )

    def logits(self, x_NE: Tensor) -> Tensor:
        """Return logits_NV of this rank's part; padding is -inf."""
        return self._forward.own_logits(x_NE)

    def sample(
        self,
        logits_NV: Tensor,
        staged: Mapping[str, Tensor],
        last_R: Tensor,
        token_N: Tensor,
        logprobs_2N: Tensor,
    ) -> None:
        """Choose for the staged rows, by two gathers of the group."""
        count = len(logits_NV)
        sample_shard(
            logits_NV,
            staged["inverse"][:count],
            staged["uniform"][:count],
            self._scratch,
            staged["row"][:count],
            last_R,
            token_N,
            logprobs_2N,
            self._group.all_gather,
        )
