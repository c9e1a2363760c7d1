"""What OpenRLHF's own functions give: as `ask_losses.py`, with the folder of a checkout as third
argument.

OpenRLHF needs DeepSpeed and a CUDA compiler to install, so its values are kept in `losses.json`,
with their commit:

    git clone https://github.com/OpenRLHF/OpenRLHF && python tests/peers/make_losses.py OpenRLHF

Its loss and utility modules are loaded from the checkout as they are; of DeepSpeed they need the
name alone.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

sys.path.append(str(Path(__file__).parent))  # `-P` leaves it out
from ask_losses import Data, answer

sys.modules["deepspeed"] = ModuleType("deepspeed")
package = ModuleType("openrlhf_models")
package.__path__ = [str(Path(sys.argv[3]) / "openrlhf" / "models")]
sys.modules["openrlhf_models"] = package
losses = importlib.import_module("openrlhf_models.loss")
helpers = importlib.import_module("openrlhf_models.utils")


def policy(data: Data, args: dict[str, Any]) -> torch.Tensor:
    made = losses.PolicyLoss(
        clip_eps_low=args.get("low", 0.2),
        clip_eps_high=args.get("high", 0.2),
        dual_clip=args.get("c"),
        token_level_loss=args["agg"] == "token",
        policy_loss_type=args.get("type", "ppo"),
        enable_vllm_is_correction="is" in args,
        vllm_is_truncated_threshold=args.get("band"),
        vllm_is_correction_type=args.get("is", "tis"),
    )
    given = data["logprobs"], data["old"], data["advantages"], data["mask"], data["behavior"]
    loss = made(*given)[0]
    if "kl" in args:
        kl = helpers.compute_approx_kl(
            data["logprobs"].float(), data["reference"].float(), args["kl"]
        )
        loss = loss + args["kl_coef"] * losses.aggregate_loss(
            kl, data["mask"], args["agg"] == "token"
        )
    return loss


def value(data: Data, args: dict[str, Any]) -> torch.Tensor:
    made = losses.ValueLoss(clip_eps=args.get("clip"), token_level_loss=args["agg"] == "token")
    return made(data["values"], data["old_values"], data["returns"], data["mask"])


def dpo(data: Data, args: dict[str, Any]) -> torch.Tensor:
    made = losses.DPOLoss(args["beta"], args.get("label_smoothing", 0.0), args.get("ipo", False))
    policy_logps = (data["logprobs"] * data["mask"]).sum(1).chunk(2)
    return made(*policy_logps, *(data["reference"] * data["mask"]).sum(1).chunk(2))[0]


def pair(data: Data, args: dict[str, Any]) -> torch.Tensor:
    chosen, rejected = data["scores"].chunk(2)
    return losses.PairWiseLoss()(chosen, rejected, data["margins"] if args.get("margin") else None)


def sft(data: Data, args: dict[str, Any]) -> torch.Tensor:
    return losses.SFTLoss(token_level_loss=args["agg"] == "token")(data["logprobs"], data["mask"])


CALLS = {"policy": policy, "value": value, "dpo": dpo, "rm": pair, "sft": sft}

if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    torch.set_default_dtype(torch.float64)
    told = {
        name: answer(CALLS[call], asked["data"][data], args)
        for name, _, call, args, data in asked["rows"]
    }
    Path(sys.argv[2]).write_text(json.dumps(told))
