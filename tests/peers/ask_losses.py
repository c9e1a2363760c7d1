"""What verl's and TRL's own functions give on padded data. In: {"data": {...}, "rows": [[name,
peer, call, args, data]]}. Out: {name: {"loss": x, "grads": {leaf: …}}} or {name: {"advantages": …,
"returns": …}}.

Started by `environment.ask` in the peers' environment. TRL's losses are methods of trainers: they
are called with an object that holds the settings that they read, and TRL's weights are the lines of
its trainer that compute them.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from trl.trainer import grpo_trainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.workers.config.actor import ActorConfig, PolicyLossConfig

Data = dict[str, torch.Tensor]
NO_DUAL_CLIP = 1e30


def verl_policy(data: Data, args: dict[str, Any]) -> torch.Tensor:
    """Actor loss as verl's actor adds it up: policy, minus the entropy, plus the KL."""
    mask, agg = data["mask"], args["agg"]
    whole = {
        "dp_size": 1,
        "batch_num_tokens": mask.sum().item(),
        "global_batch_size": (mask.sum(1) > 0).sum().item(),
    }
    if "scale" in args:
        whole["loss_scale_factor"] = args["scale"]
    correction = {
        "rollout_is": args.get("is"),
        "rollout_is_threshold": args.get("is_threshold", 2.0),
    }
    correction |= {"rollout_rs": args.get("rs"), "rollout_rs_threshold": args.get("rs_threshold")}
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=args.get("low", 0.2),
        clip_ratio_high=args.get("high", 0.2),
        clip_ratio_c=args.get("c", NO_DUAL_CLIP),
        policy_loss=PolicyLossConfig(
            rollout_correction={**correction, "loss_type": args.get("loss_type", "ppo_clip")}
        ),
    )
    config.global_batch_info.update(whole)
    old, weights = data["old"], None
    mode = args.get("mode", "vanilla")
    if mode == "bypass_mode":
        old = data["behavior"]
    elif "is" in args or "rs" in args:
        proto, mask, _ = compute_rollout_correction_and_rejection_mask(
            data["old"], data["behavior"], mask, **correction
        )
        weights = None if proto is None else proto.batch["rollout_is_weights"]
    call = core_algos.get_policy_loss_fn(mode)
    loss, _ = call(old, data["logprobs"], data["advantages"], mask, agg, config, weights)
    if "entropy" in args:
        loss = loss - args["entropy"] * core_algos.agg_loss(
            data["entropy"], data["mask"], agg, **whole
        )
    if "kl" in args:
        kl = core_algos.kl_penalty(data["logprobs"], data["reference"], args["kl"])
        loss = loss + args["kl_coef"] * core_algos.agg_loss(kl, data["mask"], agg, **whole)
    return loss


def verl_value(data: Data, args: dict[str, Any]) -> torch.Tensor:
    given = (
        data["values"],
        data["returns"],
        data["old_values"],
        data["mask"],
        args["clip"],
        args["agg"],
    )
    return core_algos.compute_value_loss(*given)[0]


def verl_advantage(data: Data, args: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Scores at each completion's last token, less the KL of each token where it is in the
    reward."""
    mask = data["mask"]
    rewards = torch.zeros_like(mask)
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    rewards[torch.arange(len(mask)), last] = data["rewards"]
    if "kl" in args:
        rewards = rewards - args["kl_coef"] * mask * core_algos.kl_penalty(
            data["logprobs"].detach(), data["reference"], args["kl"]
        )
    index = np.array([str(int(group)) for group in data["groups"].tolist()])
    name = args["estimator"]
    if name == "gae":
        given = rewards, data["old_values"], mask, args["gamma"], args["lam"]
        advantages, returns = core_algos.compute_gae_advantage_return(*given)
        return {"advantages": advantages * mask, "returns": returns * mask}
    more: dict[str, Any] = (
        {"config": SimpleNamespace(gamma=1.0)}
        if name == "reinforce_plus_plus"
        else {"index": index}
    )
    if "std" in args:
        more["norm_adv_by_std_in_grpo"] = args["std"]
    advantages, _ = core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=rewards, response_mask=mask, **more
    )
    return {"advantages": advantages * mask}


class Alone:
    """The accelerator of one process."""

    device = torch.device("cpu")
    num_processes = 1
    sync_gradients = True

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values

    gather_for_metrics = gather

    def reduce(self, values: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        return values


class Numbers(dict):
    """Metrics that nobody reads."""

    def __missing__(self, key: str) -> Any:
        self[key] = Numbers() if key == "train" else []
        return self[key]


def trl_weights(data: Data, args: dict[str, Any]) -> torch.Tensor:
    """The lines of GRPOTrainer that compute `vllm_importance_sampling_ratio`."""
    source = inspect.getsource(grpo_trainer)
    begin = source.index(
        "                per_token_logps_diff = (old_per_token_logps - sampling_per_token_logps) "
        "* mask"
    )
    end = source.index(
        "            # Compute the per-token log probabilities for the reference model", begin
    )
    settings = SimpleNamespace(
        vllm_importance_sampling_mode=args["is"],
        vllm_importance_sampling_clip_min=args.get("is_min"),
        vllm_importance_sampling_clip_max=args.get("is_max"),
    )
    names: dict[str, Any] = {
        "self": settings,
        "torch": torch,
        "math": math,
        "mask": data["mask"],
        "old_per_token_logps": data["old"],
        "sampling_per_token_logps": data["behavior"],
    }
    exec(textwrap.dedent(source[begin:end]), names)
    return names["vllm_importance_sampling_ratio"]


class Policy(GRPOTrainer):
    """TRL's trainer with the settings that its loss reads, and nothing else."""

    def __init__(self, **settings: Any) -> None:
        self.__dict__.update(settings)

    def loss(self, inputs: dict[str, Any]) -> torch.Tensor:
        return self._compute_loss(None, inputs)


class Preference(DPOTrainer):
    """Likewise."""

    def __init__(self, **settings: Any) -> None:
        self.__dict__.update(settings)


def trl_policy(data: Data, args: dict[str, Any]) -> torch.Tensor:
    mask = data["mask"]
    trainer = Policy(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            data["logprobs"],
            data["entropy"],
            None,
        ),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=args.get("off_policy"),
        importance_sampling_level=args.get("level", "token"),
        beta=args.get("beta", 0.0),
        args=SimpleNamespace(
            use_bias_correction_kl=args.get("bias_correction", False),
            delta=args.get("delta"),
            steps_per_generation=1,
        ),
        loss_type=args["loss_type"],
        epsilon_low=args.get("low", 0.2),
        epsilon_high=args.get("high", 0.2),
        use_vllm="is" in args,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=args.get("scale"),
        _entropy_bonus_enabled="entropy" in args,
        use_adaptive_entropy=False,
        entropy_coef=args.get("entropy", 0.0),
        accelerator=Alone(),
        _metrics=Numbers(),
    )
    blank = torch.zeros(len(mask), 1)
    inputs = {
        "prompt_ids": blank, "prompt_mask": blank, "completion_ids": mask, "completion_mask": mask,
        "advantages": data["advantages"], "old_per_token_logps": data["old"],
        "ref_per_token_logps": data["reference"], "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    if "off_policy" in args:
        inputs["sampling_per_token_logps"] = data["behavior"]
    if "is" in args:
        inputs["importance_sampling_ratio"] = trl_weights(data, args)
    return trainer.loss(inputs)


def trl_dpo(data: Data, args: dict[str, Any]) -> torch.Tensor:
    mask = data["mask"]
    nothing = torch.zeros_like(mask)
    outputs = SimpleNamespace(
        log_probs=data["logprobs"] * mask,
        entropy=nothing,
        mean_logits=nothing,
        is_top1=nothing.bool(),
    )
    trainer = Preference(
        model=SimpleNamespace(training=True),
        accelerator=Alone(),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=args["loss_types"],
        loss_weights=args.get("weights", [1.0]),
        beta=args["beta"],
        use_weighting=False,
        _metrics=Numbers(),
        _total_train_tokens=0,
        _tp_size=1,
    )
    chosen, rejected = (data["reference"] * mask).sum(1).chunk(2)
    widened = torch.cat([torch.zeros(len(mask), 1), mask], dim=1)
    inputs = {
        "completion_mask": widened,
        "input_ids": widened,
        "attention_mask": widened,
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    return trainer.compute_loss(lambda **_: outputs, inputs)


def trl_rm(data: Data, args: dict[str, Any]) -> torch.Tensor:
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=Alone(),
        args=SimpleNamespace(center_rewards_coefficient=args.get("center")),
        _metrics=Numbers(),
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"attention_mask": data["mask"]} | (
        {"margin": data["margins"]} if args.get("margin") else {}
    )
    return RewardTrainer.compute_loss(
        trainer, lambda **_: SimpleNamespace(logits=data["scores"][:, None]), inputs
    )


CALLS = {
    "verl": {"policy": verl_policy, "value": verl_value, "advantage": verl_advantage},
    "trl": {"policy": trl_policy, "dpo": trl_dpo, "rm": trl_rm},
}
LEAVES = ("logprobs", "entropy", "values", "scores")


def answer(call: Any, given: dict[str, Any], args: dict[str, Any]) -> dict[str, Any]:
    """Loss and its gradient by each leaf, or what the call returns by name."""
    data = {name: torch.tensor(values, dtype=torch.float64) for name, values in given.items()}
    for leaf in LEAVES:
        data[leaf].requires_grad_(True)
    found = call(data, args)
    if isinstance(found, dict):
        return {name: values.tolist() for name, values in found.items()}
    found.backward()
    grads = {leaf: data[leaf].grad.tolist() for leaf in LEAVES if data[leaf].grad is not None}
    return {"loss": found.item(), "grads": grads}


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    torch.set_default_dtype(torch.float64)
    with contextlib.redirect_stdout(sys.stderr):
        told = {
            name: answer(CALLS[peer][call], asked["data"][data], args)
            for name, peer, call, args, data in asked["rows"]
        }
    Path(sys.argv[2]).write_text(json.dumps(told))
