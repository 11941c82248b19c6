"""TrainSpec: the optimizer's settings and the length of a run."""

from dataclasses import dataclass

from simulator.specs.checks import require, require_at_least, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """How long and how a model is trained; AdamW with a linear warm-up and a cosine decay to zero.

    Attributes:
        num_steps: optimizer updates.
        learning_rate: its peak.
        weight_decay: decoupled, on every parameter.
        warmup_steps: updates over which the learning rate rises from zero.
        max_gradient_norm: gradients are scaled down to this global norm.
        evaluate_every_steps: updates between evaluations; the last update is always followed by one.
        trace_steps: updates recorded task by task, after the first ones that are slower.
        seed: of parameters, dropout, sampled neighbours and the order of batches.
        compile_dense: compile what lies between attentions, which takes tens of seconds at the start and makes a step
            shorter: it pays in long runs. On GPUs, for full-graph batches.
        collective_timeout_seconds: how long ranks wait for one that gets no further before all of them end; 0 for what
            `simulator/timeout.py` derives from the plan's prediction.
        cpu_affinity: each rank keeps to its share of its host's cores, on GPU hosts of those near its GPU.
        checkpoint_every_steps: updates between checkpoints; 0 for none, also none on SIGTERM or Ctrl-C.
        num_checkpoints_kept: the newest ones; older ones are removed once a newer one is whole.
        asynchronous_checkpoints: write them while training goes on, from a copy in the host's memory.
    """

    num_steps: int
    learning_rate: float
    weight_decay: float = 0.0
    warmup_steps: int = 0
    max_gradient_norm: float = 1.0
    evaluate_every_steps: int = 10
    trace_steps: int = 0
    seed: int = 0
    compile_dense: bool = False
    collective_timeout_seconds: float = 0.0
    cpu_affinity: bool = True
    checkpoint_every_steps: int = 0
    num_checkpoints_kept: int = 2
    asynchronous_checkpoints: bool = True

    def __post_init__(self) -> None:
        require_positive(num_steps=self.num_steps, learning_rate=self.learning_rate)
        require_positive(max_gradient_norm=self.max_gradient_norm, evaluate_every_steps=self.evaluate_every_steps)
        require_at_least(0, weight_decay=self.weight_decay, warmup_steps=self.warmup_steps, seed=self.seed)
        require_at_least(0, trace_steps=self.trace_steps, collective_timeout_seconds=self.collective_timeout_seconds)
        require_at_least(0, checkpoint_every_steps=self.checkpoint_every_steps)
        require_positive(num_checkpoints_kept=self.num_checkpoints_kept)
        rule = f"must not exceed num_steps = {self.num_steps}"
        require(self.warmup_steps <= self.num_steps, "warmup_steps", rule, self.warmup_steps)
