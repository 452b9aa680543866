"""An environment behind a server of OpenEnv: FrozenLake, served by `jaxroll env serve`.

Command   jaxroll env serve frozen_lake --config=configs/agentic_frozen_lake.py --port=8000
          jaxroll train --config=configs/openenv_frozen_lake.py
Hardware  any; one device per role; pip install 'jaxroll[openenv]'
Setting   the lakes of agentic_frozen_lake, one WebSocket for each episode; warm start on random moves, as the protocol
          has no teacher, then GRPO at alpha = 1 with reward 1 at the goal
Result    docs/results/environment_curves.md
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxroll.config import read


def get_config() -> ConfigDict:
    """agentic_frozen_lake with another player and another teacher."""
    config = read(Path(__file__).with_name("agentic_frozen_lake.py"))
    config.run.name = "openenv_frozen_lake"
    config.task.name = config.task.env = "openenv"
    config.task.args = {
        "url": "http://127.0.0.1:8000",
        "action": "answer",
        "max_turns": 10,
        "noise": 1.0,
        "moves": ("left", "right", "up", "down"),
    }
    return config
