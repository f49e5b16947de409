"""An agent that knows nothing of AstraFlow but two variables of its environment: it asks, and once more for the box."""

import json
import os
from pathlib import Path

try:
    from openai import OpenAI
except ModuleNotFoundError as missing:
    raise SystemExit(f"agent.py needs a package: {missing}; run: pip install openai") from missing

task = json.loads(Path(os.environ["ASTRAFLOW_TASK"]).read_text())
client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
chat = task["messages"]
for _ in range(2):
    answer = client.chat.completions.create(model="solver", messages=chat).choices[0].message
    if "\\boxed{" in (answer.content or ""):
        break
    chat = [*chat, answer, {"role": "user", "content": "Box it."}]
