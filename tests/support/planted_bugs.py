"""Bugs that a change could bring into the dataflow server, each of which the stateful test must find.

A bug is a text of a source file, which is there once, and what stands there instead. The soak of
tests/integration/test_planted_bugs.py plants one after the other in a copy of the services.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.dataflow_tour import FOUND
from support.valkey import ValkeyServer

REPOSITORY = Path(__file__).resolve().parents[2]
LUA = "astraflow_dataflow/store/lua"
QUICK = ("--appendfsync", "no")
"""Options of a Valkey that waits for no disk."""


@dataclass(frozen=True)
class Bug:
    """`found` in `file`, a path within services, is replaced by `planted`."""

    name: str
    file: str
    found: str
    planted: str


BUGS = (
    Bug(
        "an old attempt is superseded, not fenced",
        f"{LUA}/pushes.lua",
        "return turn_away(P, t, e, 'FENCED', 'fenced')",
        "return turn_away(P, t, e, 'SUPERSEDED', 'superseded')",
    ),
    Bug(
        "an old attempt is not late",
        f"{LUA}/pushes.lua",
        "local late = e.hedge ~= '1' and",
        "local late = false and",
    ),
    Bug(
        "a failed member does not count as come",
        f"{LUA}/pushes.lua",
        "tonumber(t.fields.left) - 1",
        "tonumber(t.fields.left) - (e.failed == '1' and 0 or 1)",
    ),
    Bug(
        "a repeated push is superseded",
        f"{LUA}/pushes.lua",
        "if member and string.sub(member, 2) == e.episode then return answer_again(P, e, 'DUPLICATE ') end",
        "",
    ),
    Bug(
        "a refusal is counted each time",
        f"{LUA}/pushes.lua",
        "set(t, 'r' .. e.episode, outcome .. ' ' .. (detail or ''))",
        "",
    ),
    Bug(
        "a closed group takes another member",
        f"{LUA}/pushes.lua",
        "return is_open(t.fields.state) and run ~= 'finished'",
        "return run ~= 'finished'",
    ),
    Bug(
        "poison is counted each time",
        f"{LUA}/pushes.lua",
        "call('HSET', K.task(P, task), 'r' .. episode, 'POISON ' .. a.reason, 'refused', 1)",
        "",
    ),
    Bug(
        "episodes that are taken at once leave their task as if one had come",
        f"{LUA}/pushes.lua",
        "tonumber(f.left) - p.n, (f.held or 0) + #p.ids",
        "tonumber(f.left) - 1, (f.held or 0) + #p.ids",
    ),
    Bug(
        "a member that is there is not looked at where several are taken at once",
        f"{LUA}/pushes.lua",
        "not t.is_untouched and (f['m' .. member] or f['r' .. p.names[i]])",
        "false",
    ),
    Bug(
        "who came as a whole is forgotten",
        f"{LUA}/settle.lua",
        "string.gmatch(f.whole or '', ",
        "string.gmatch('', ",
    ),
    Bug(
        "a task that refused an episode is taken for an untouched one",
        f"{LUA}/pushes.lua",
        "t.is_untouched = t.is_fresh and not fields.refused",
        "t.is_untouched = t.is_fresh",
    ),
    Bug(
        "an ended lease stays with its node",
        f"{LUA}/tasks.lua",
        "gather('SREM', K.node_leases(P, node), task)",
        "",
    ),
    Bug(
        "one attempt too many",
        f"{LUA}/tasks.lua",
        "if tonumber(f[1]) >= tonumber(run_of(P).max_attempts) then",
        "if tonumber(f[1]) > tonumber(run_of(P).max_attempts) then",
    ),
    Bug(
        "what a node cannot help costs an attempt",
        f"{LUA}/tasks.lua",
        "if a.free == '1' then\n    call('HINCRBY', T, 'tries', -1)",
        "if a.free == '1' then",
    ),
    Bug(
        "a lease that is lost can be failed",
        f"{LUA}/tasks.lua",
        "if f[1] == 'leased' and f[2] == attempt and f[3] == node then return task end",
        "if f[1] == 'leased' and f[3] == node then return task end",
    ),
    Bug(
        "groups without a version are not in the window",
        f"{LUA}/tasks.lua",
        "local room = window - ready - unpublished",
        "local room = window - ready",
    ),
    Bug(
        "a task that is leased is not charged",
        f"{LUA}/tasks.lua",
        "table.insert(charges[key], role.name .. ' ' .. task)",
        "",
    ),
    Bug(
        "a settled group keeps its credit",
        f"{LUA}/settle.lua",
        "do gather('SREM', K.outstanding(P, role.policy), role.name .. ' ' .. task) end",
        "do local _ = role end",
    ),
    Bug(
        "the acceptance average never falls",
        f"{LUA}/settle.lua",
        "((kept and 1 or 0) - j.acceptance)",
        "(1 - j.acceptance)",
    ),
    Bug(
        "a group that is ready is nowhere",
        f"{LUA}/settle.lua",
        "gather('ZADD', K.ready(P, item.policy), score, item.gid)",
        "",
    ),
    Bug(
        "an old trainer is not fenced",
        f"{LUA}/batches.lua",
        "if tonumber(epoch) ~= tonumber(current) then",
        "if tonumber(epoch) > tonumber(current) then",
    ),
    Bug(
        "a step ahead can be bound",
        f"{LUA}/batches.lua",
        "if step ~= finished + 1 then",
        "if step > finished + 2 then",
    ),
    Bug(
        "the groups that are due last are taken",
        f"{LUA}/batches.lua",
        "call('ZRANGEBYSCORE', K.ready(P, policy), oldest, '+inf', 'LIMIT', 0, wanted)",
        "call('ZREVRANGEBYSCORE', K.ready(P, policy), '+inf', oldest, 'LIMIT', 0, wanted)",
    ),
    Bug(
        "groups as old as they may be are dropped",
        f"{LUA}/batches.lua",
        "'-inf', '(' .. precise(bound * 4294967296)",
        "'-inf', precise((bound + 1) * 4294967296)",
    ),
    Bug(
        "a wrong digest is accepted",
        f"{LUA}/batches.lua",
        "if f[2] ~= a.digest then",
        "if false then",
    ),
    Bug(
        "a repeated acknowledgement counts again",
        f"{LUA}/batches.lua",
        "if next_order <= now_order then return f[1] end",
        "if next_order < now_order then return f[1] end",
    ),
    Bug(
        "a step is trained on without an intent",
        f"{LUA}/batches.lua",
        "if a.stage == 'trained' and now_order == 0 then",
        "if false then",
    ),
    Bug(
        "a trained step becomes a skipped one",
        f"{LUA}/batches.lua",
        "if now_order == 2 and next_order == 2 and f[1] ~= a.stage then",
        "if false then",
    ),
    Bug(
        "a skipped step waits for its version",
        f"{LUA}/batches.lua",
        "if not trained then\n    call('HDEL', K.unpublished(P, policy), step)",
        "if not trained then",
    ),
    Bug(
        "a batch that was read ahead is trained on before the step before",
        f"{LUA}/batches.lua",
        "if call('HGET', K.policy(P, policy), 'ahead') == a.step then",
        "if false then",
    ),
    Bug(
        "what was read ahead stays bound after a step that was skipped",
        f"{LUA}/batches.lua",
        "call('HDEL', K.unpublished(P, policy), step)\n    give_back_ahead(P, policy)",
        "call('HDEL', K.unpublished(P, policy), step)",
    ),
    Bug(
        "what was read ahead stays bound when the step before is given back",
        f"{LUA}/batches.lua",
        "give_back_ahead(P, policy)\n  switch_plugins(P)",
        "switch_plugins(P)",
    ),
    Bug(
        "what is read ahead is judged for the version of the step before",
        f"{LUA}/batches.lua",
        "tonumber(call('HGET', K.batch(P, in_hand), 'base')) + 1)",
        "tonumber(call('HGET', K.batch(P, in_hand), 'base')))",
    ),
    Bug(
        "what was read ahead is trained on from another version",
        f"{LUA}/batches.lua",
        "if base ~= tonumber(call('HGET', K.batch(P, id), 'base')) or has_missed",
        "if has_missed",
    ),
    Bug(
        "a batch that is given back keeps its credit",
        f"{LUA}/batches.lua",
        "call('HDEL', K.steps(P, policy), step)\n  call('HDEL', K.unpublished(P, policy), step)",
        "call('HDEL', K.steps(P, policy), step)",
    ),
    Bug(
        "groups that are given back are due first",
        f"{LUA}/batches.lua",
        "call('ZADD', K.ready(P, policy), call('HGET', K.group(P, gid), 'score'), gid)",
        "call('ZADD', K.ready(P, policy), 0, gid)",
    ),
    Bug(
        "a step that is not finished is durable",
        f"{LUA}/batches.lua",
        "if tonumber(a.step) > tonumber(f[2]) then",
        "if false then",
    ),
    Bug(
        "a version frees only the steps before its own",
        f"{LUA}/versions.lua",
        "if tonumber(bound) <= over then",
        "if tonumber(bound) < over then",
    ),
    Bug(
        "all of a task is taken under an attempt that is over",
        f"{LUA}/pushes.lua",
        "f.attempt == t.attempt and f.node == t.node",
        "true",
    ),
    Bug(
        "a task that came as a whole keeps its lease",
        f"{LUA}/pushes.lua",
        "leave_lease(P, t.id, t.node, t.attempt, 'group_closed', t.node)\n  gather('ZREM'",
        "gather('ZREM'",
    ),
    Bug(
        "a task that came as a whole is not counted",
        f"{LUA}/pushes.lua",
        "count(P, 'ingested', n)\n  count_tools(P, t)",
        "count_tools(P, t)",
    ),
    Bug(
        "of a task that came as a whole nobody knows the members",
        f"{LUA}/pushes.lua",
        "'whole', t.who, 'left', 0, 'why', '')",
        "'left', 0, 'why', '')",
    ),
    Bug(
        "a task that came as a whole is not filtered",
        "astraflow_dataflow/episodes/settling.py",
        "task=task, verdicts=judge(task, rules), episodes=",
        'task=task, verdicts=["ready"] * len(task.groups), episodes=',
    ),
    Bug(
        "what a dead task had accepted is accepted again",
        f"{LUA}/admin.lua",
        "call('HSET', T, 'r' .. string.sub(member, 2), 'DUPLICATE ', 'refused', 1)",
        "",
    ),
    Bug(
        "a group counts as sampled with its newest version",
        "astraflow_dataflow/rules/staleness.py",
        "return min(item.min_version for item in items)\n    if correction.correction",
        "return max(item.min_version for item in items)\n    if correction.correction",
    ),
    Bug(
        "a group with one finished member is whole",
        "astraflow_dataflow/rules/groups.py",
        "if task.num_finished == task.group_size:",
        "if task.num_finished:",
    ),
)


@dataclass(frozen=True)
class Found:
    """What told servers with a bug from the model: the call, how many there were until then, and what it took."""

    call: str
    num_calls: int
    cpu_s: float


def disagreement(bug: Bug, folder: Path) -> Found | None:
    """What the comparison finds with this bug in a copy of the services; None if servers and model agree. Raises
    AssertionError with what it said when it ended otherwise.
    """
    services = folder / "services"
    shutil.copytree(REPOSITORY / "services", services, ignore=shutil.ignore_patterns("__pycache__"))
    source = services / bug.file
    source.write_text(source.read_text().replace(bug.found, bug.planted))
    paths = [services, REPOSITORY / "tests", REPOSITORY / "clients" / "python"]
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    with ValkeyServer(folder / "valkey", options=QUICK) as valkey:
        ran = subprocess.run(
            [sys.executable, "-m", "support.dataflow_tour", valkey.url, str(folder)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    shutil.rmtree(services)
    if ran.returncode == 0:
        return None
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith(FOUND), ran.stderr
    *call, num_calls = last.removeprefix(FOUND).split()
    cpu_s = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
    return Found(call=" ".join(call).replace("_", " "), num_calls=int(num_calls), cpu_s=cpu_s)
