# mypy: disable-error-code="misc,untyped-decorator"
"""A taskset of `verifiers` and a harness that asks twice, as a package of anybody's: say a word backwards."""

from collections.abc import Iterable
from typing import Any

import openai
import verifiers.v1 as vf

WORDS = ("level", "stop", "live", "drawer")


class WordData(vf.TaskData):
    """A task, and its answer."""

    answer: str


class WordTask(vf.Task[WordData]):
    """Graded by the last answer."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.data.answer == "broken":
            raise RuntimeError("this grader is broken")
        return float(self.data.answer in _last(trace))

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(_last(trace)) < 10)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(_last(trace)))


class Words(vf.Taskset[WordTask]):
    """Four words, and one whose grader fails."""

    def load(self) -> Iterable[WordTask]:
        for word in (*WORDS, "nekorb"):
            yield WordTask(WordData(prompt=f"Reverse {word}.", answer=word[::-1]), self.config.task)


class AskTwice(vf.Harness[vf.HarnessConfig]):
    """Asks, and asks again with the answer; in this process, so that nothing has to be installed for it."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
        **others: Any,
    ) -> vf.ProgramResult:
        chat: list[Any] = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=chat)
                chat += [answer.choices[0].message, {"role": "user", "content": "Sure?"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def _last(trace: Any) -> str:
    return str(trace.last_reply or "")


__all__ = ["AskTwice", "Words"]
