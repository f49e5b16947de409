"""An agent that asks twice, with nothing but the standard library; it lives long enough to be killed."""

import json
import os
import time
import urllib.request
from pathlib import Path

task = json.loads(Path(os.environ["ASTRAFLOW_TASK"]).read_text())
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
for _ in range(2):
    body = json.dumps({"model": "solver", "messages": task["messages"]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with opener.open(request) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"] or ""
    time.sleep(0.2)
Path(os.environ["ASTRAFLOW_RESULT"]).write_text(json.dumps({"answer": said}))
