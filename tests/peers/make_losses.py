"""Write `losses.json`: the data and what the peers say of it. In: a checkout of OpenRLHF, and `make
peers` done before.

python tests/peers/make_losses.py OPENRLHF_CHECKOUT
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from environment import FOLDER, PEERS, ask
from loss_cases import make_data, question

HERE = Path(__file__).parent


def main(checkout: Path) -> None:
    data = make_data()
    answers = ask(HERE / "ask_losses.py", question(("verl", "trl"), data))
    answers |= ask(HERE / "ask_openrlhf.py", question(("openrlhf",), data), more=(str(checkout),))
    commit = subprocess.check_output(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], text=True
    ).strip()
    made = {"of": [*PEERS, f"OpenRLHF {commit}"], "data": data, "answers": answers}
    (HERE / "losses.json").write_text(json.dumps(made, indent=None, separators=(",", ":")) + "\n")
    print(f"{len(answers)} answers of {made['of']}, computed in {FOLDER.name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
