"""Trainer config: optimization and snapshots. In: TOML tables `[trainer]`, `[snapshot]`. Out:
frozen sections. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from gyre.core.config import Section
from gyre.core.errors import ConfigError
from gyre.core.records import Checkpointing, Matmul, Moments

# at 1 a moment keeps nothing of the gradient and has no mean
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


HIGHEST_RATE = 1.0  # that a config may name: an update by more replaces every weight
HIGH_RATE = 0.02  # the standard deviation that weights begin with


class TrainerConfig(Section):
    """Optimization of a stage."""

    steps: int = Field(default=100, ge=1)
    """Loop steps of the stage; the learning-rate schedule ends with them."""
    learning_rate: float = Field(default=1e-4, ge=0.0, le=HIGHEST_RATE)
    """Peak learning rate of the actor. AdamW moves each weight by about as much in one update,
    whatever the gradient: 1e-6 to 3e-3 is usual, more than 0.02 is an event
    (`warn.learning_rate_high`)."""
    critic_learning_rate: float | None = Field(default=None, ge=0.0, le=HIGHEST_RATE)
    """Peak learning rate of the critic; none takes `learning_rate`."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Shape of the learning rate after warm-up; cosine and linear fall to
    `final_learning_rate_fraction`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Loop steps over which the learning rate rises linearly from 1/warmup_steps of the peak."""
    final_learning_rate_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """What part of the peak is left at the last step of a cosine or linear schedule."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment, each 0 or more and less than 1."""
    eps: float = Field(default=1e-8, gt=0.0)
    """AdamW's term in the denominator."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled weight decay of matrices; norms, biases and scalar heads have none."""
    grad_clip: float = Field(default=1.0, ge=0.0)
    """Largest global gradient norm; 0 does not clip."""
    sequences_per_update: int = Field(default=0, ge=0)
    """Sequences per optimizer update; 0 takes the whole batch of the loop step."""
    epochs_per_batch: int = Field(default=1, ge=1)
    """Passes over each batch."""
    tokens_per_chunk: int = Field(default=8192, ge=16)
    """Tokens per forward and backward pass. Changes speed and memory, never the gradient."""
    checkpointing: Checkpointing = "none"
    """Activations kept of each layer for its backward pass. none: all that it needs. selective:
    those that are expensive to compute again (q, k and v, attention, the stream between the
    halves): about a third of the bytes for about a seventh more time. full: the layer's input
    alone, for about a third more time. Changes speed and memory, never the gradient. With
    engine.batch_invariant the policy always keeps layer inputs alone."""
    matmul: Matmul = "same"
    """What the matrix products of the decoder's layers multiply, forward and backward. same:
    run.dtype. fp8: 8-bit floats, each operand scaled by its largest number; for a GPU of compute
    capability 8.9 or more, and slowly on a CPU. Embedding, head, norms and attention stay in
    run.dtype, as do matrices with a size that 16 does not divide; master weights and the engine's
    weights are the same either way."""
    moments: Moments = "float32"
    """How AdamW keeps its two moments. float32: 8 bytes per parameter. 8_bit: a code of 8 bits for
    each number and a float32 scale for each 256 of them, 2.03 bytes per parameter, by the library
    bitsandbytes (extra `moments`). It is for matrices whose rows are whole blocks of 256 numbers;
    what else is trained stays float32, as do master weights. Changes what is learned by a little. A
    snapshot of the one is no snapshot of the other."""
    offload_optimizer: Literal["none", "host", "disk"] = "none"
    """Where master weights of their own and both moments live. none: on the device. host: in pinned
    host memory. disk: in a file under `memory.disk_folder`. They visit the device in cuts for each
    update; its numbers are the same. On a CPU, host saves nothing."""
    offload_gradients: bool = False
    """Whether the float32 gradient is summed in host memory: each parameter's is sent there as soon
    as it is complete."""
    offload_parameters: tuple[Literal["actor", "critic", "reference", "reward"], ...] = ()
    """Models whose weights live in pinned host memory, whole on each rank (parallel.zero 0 or 1 of
    the model). A layer comes to the device while the one before computes; embedding and head come
    for a whole pass. A model that is trained needs offload_optimizer, and the actor a stage without
    an engine, which would share its weights."""
    offload_cut_bytes: int = Field(default=128 << 20, ge=4096)
    """Bytes of a cut; three of them, per trained model, are on the device while it trains."""
    offload_deadline_s: float = Field(default=300.0, gt=0.0)
    """Longest that an update waits for one transfer of a cut."""
    trace_steps: tuple[int, ...] = ()
    """Loop steps whose training is traced with torch.profiler, on the first rank:
    RUN/traces/step-N.trace.json.gz, which Perfetto and chrome://tracing open. A traced step is
    slower. A cold start has none."""
    reference: Literal["none", "initial"] = "initial"
    """What the KL term and DPO compare with: a copy of the weights that the stage began with. It is
    made only for an objective that needs one; none forbids it, for data that brings its own
    reference log-probs."""
    reference_refresh_steps: int = Field(default=0, ge=0)
    """Replace the reference by the policy every n loop steps; 0 never."""
    reference_moving_average: float = Field(default=0.0, ge=0.0, lt=1.0)
    """After each loop step reference = this × reference + (1 − this) × policy; 0 turns it off."""

    @model_validator(mode="after")
    def check_offloaded(self) -> TrainerConfig:
        if len(set(self.offload_parameters)) < len(self.offload_parameters):
            raise ValueError(
                f"offload_parameters = {list(self.offload_parameters)}: name each model once"
            )
        trained = [name for name in self.offload_parameters if name in ("actor", "critic")]
        if trained and self.offload_optimizer == "none":
            raise ValueError(
                f"offload_parameters = {list(self.offload_parameters)} with offload_optimizer = "
                "'none': the larger state goes first, set offload_optimizer = 'host' or 'disk', or "
                f"take {' and '.join(trained)} off the list"
            )
        if "reference" in self.offload_parameters and self.reference_moving_average:
            raise ValueError(
                f"offload_parameters = {list(self.offload_parameters)} with "
                f"reference_moving_average = {self.reference_moving_average:g}: the average has no "
                "place in host memory, take 'reference' off the list, or set "
                "reference_refresh_steps instead of the average"
            )
        return self

    @model_validator(mode="after")
    def check_traced(self) -> TrainerConfig:
        outside = [step for step in self.trace_steps if not 1 <= step <= self.steps]
        if outside:
            raise ValueError(
                f"trace_steps = {list(self.trace_steps)}: need loop steps from 1 to {self.steps}"
            )
        return self


def refuse_cut(model: str, *, zero: int, ranks: int) -> None:
    """Raise ConfigError for a sharded model with `offload_parameters`."""
    if zero >= 2 and ranks > 1:
        raise ConfigError(
            f"trainer.offload_parameters names '{model}', whose weights parallel.zero = {zero} "
            f"cuts over {ranks} ranks (accepted: zero 0 or 1)",
            hint=f"set parallel.zero = 1, for one model in [parallel.{model}], or take '{model}' "
            "off the list: with zero 3 a rank holds its shards and two layers",
        )


class SnapshotConfig(Section):
    """When resumable state is written and how many snapshots are kept."""

    every_steps: int = Field(default=20, ge=0)
    """Loop steps between snapshots; 0 writes one at the end of a stage only."""
    background: bool = False
    """Train on while a snapshot is copied to host memory and written. The memory stays taken: 12
    bytes per parameter, 6 with moments in 8 bits, over the number of ranks; the planner counts
    them."""
    deadline_s: float = Field(default=1800.0, gt=0.0)
    """Longest wait in seconds for a snapshot that is written in the background: of the next save,
    of the end of a stage, and of an update or a move until the state is copied. An export waits as
    long for the rank that writes. Once another rank has copied its part, an update waits for 0.8 of
    `parallel.timeout_s` at most, since that rank may be in a collective."""
    keep: int = Field(default=2, ge=1)
    """Newest snapshots kept on disk."""
    export_every_steps: int = Field(default=0, ge=0)
    """Loop steps between exports of the model under exports/ in the run folder, for a server that
    follows the run; 0 writes the export at the end alone."""
    keep_exports: int = Field(default=2, ge=1)
    """Newest of these exports kept on disk."""
