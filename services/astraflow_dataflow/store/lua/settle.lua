-- Groups: what becomes of a complete task. The server reads the members, asks the filters and calls settle; a crash in
-- between leaves the task in `settling`, where any server finds it again.

-- A task whose members all came in one push has them in one field: in `f` they are as if each had its own.
local function read_whole(f)
  for member, episode in string.gmatch(f.whole or '', '(%d+)\t([^\t\n]+)[^\n]*') do f['m' .. member] = 'f' .. episode end
end

-- A complete task as { task, why, credited, size, finished, { header... }, spec }; `f` is all of its fields, `held` its trajectories.
local function complete_task(task, f, held)
  local size, finished = tonumber(f.size), 0
  if f.whole then finished = size end
  for i = 0, not f.whole and size - 1 or -1 do
    local member = f['m' .. i]
    if member and string.sub(member, 1, 1) == 'f' then finished = finished + 1 end
  end
  return { task, f.why or '', f.credited or '*', f.size, finished, held, f.spec }
end

-- The same of one whose fields are read here; {} when it is not complete.
local function complete_task_of(P, task, size)
  local T, names, f = K.task(P, task), { 'state', 'why', 'credited', 'spec', 'size', 'whole' }, {}
  size = size or call('HGET', T, 'size') or 0
  for i = 0, tonumber(size) - 1 do names[#names + 1] = 'm' .. i end
  for i, value in ipairs(call('HMGET', T, unpack(names))) do f[names[i]] = value or nil end
  return f.state == 'complete' and complete_task(task, f, call('LRANGE', K.members(P, task), 0, -1)) or {}
end

-- members: tasks. Returns those of them that are complete.
SIGNATURE.members = { rest = true }
function F.members(keys, a)
  local found = {}
  for _, task in ipairs(a.rest) do
    local complete = complete_task_of(keys[1], task)
    if complete[1] then found[#found + 1] = complete end
  end
  return found
end

local settle_groups, write_judged
-- A block of its own, as Lua has room for 200 local names outside.
do

-- What one call settles of a policy, read once: its acceptance and the rewards of its groups, which `write_judged` writes.
local function judge(P, policy, kept, sum, n)
  CALL.judged = CALL.judged or {}
  local j = CALL.judged[policy]
  if not j then
    local f = call('HMGET', K.policy(P, policy), 'acceptance', 'smoothing', 'groups_per_step')
    j = { acceptance = tonumber(f[1]), smoothing = tonumber(f[2]), keep = tonumber(f[3]) }
    CALL.judged[policy] = j
  end
  j.acceptance = j.acceptance + j.smoothing * ((kept and 1 or 0) - j.acceptance)
  j[#j + 1] = sum .. ' ' .. n
end

function write_judged(P)
  for policy, j in pairs(CALL.judged or {}) do
    call('HSET', K.policy(P, policy), 'acceptance', precise(j.acceptance))
    call('LPUSH', K.recent(P, policy), unpack(j))
    call('LTRIM', K.recent(P, policy), 0, j.keep - 1)
  end
end

local function make_ready(P, item)
  CALL.arrivals = (CALL.arrivals or tonumber(run_of(P).arrivals or 0)) + 1
  add(K.run(P), 'arrivals', 1)
  -- Earliest deadline first: the oldest version decides, arrival breaks ties.
  local score = precise(tonumber(item.oldest) * 4294967296 + CALL.arrivals)
  call('HSET', K.group(P, item.gid), 'policy', item.policy, 'task', item.task, 'n', item.n, 'oldest', item.oldest, 'items', item.items,
    'ids', item.ids, 'score', score)
  gather('ZADD', K.ready(P, item.policy), score, item.gid)
  count(P, 'ready', tonumber(item.n))
  emit(P, 'ready ' .. item.policy)
end

-- A group goes where a route of the recipe takes it: the verdict is `evaluated_NAME` or `routed_NAME`. Its figures are kept by verdict and policy.
local function go_elsewhere(P, item)
  local evaluated, at, n = string.find(item.verdict, '^evaluated_'), item.verdict .. ' ' .. item.policy, tonumber(item.n)
  add(K.routed(P), 'g ' .. at, 1)
  add(K.routed(P), 'n ' .. at, n)
  call('HINCRBYFLOAT', K.routed(P), 'r ' .. at, item.reward_sum)
  count(P, evaluated and 'evaluated' or 'dropped:' .. item.verdict, n)
  if evaluated then forget(P, split(item.ids)) else retire(P, item.gid, item.policy, item.verdict, item.items, split(item.ids)) end
end

-- Each group of a task goes where its verdict says; `f` is what the task's hash says. Returns entries for its trace.
function settle_groups(P, task, groups, f)
  local judged, is_used, verdicts = false, false, {}
  for _, item in ipairs(groups) do
    local policy, verdict, n = item.policy, item.verdict, tonumber(item.n)
    verdicts[#verdicts + 1] = trace_entry('G', item.gid, verdict)
    add(K.policy(P, policy), 'settled', n)
    if item.judged == '1' then judge(P, policy, verdict == 'ready', item.reward_sum, n) end
    judged = judged or item.judged == '1'
    if verdict == 'ready' then
      is_used = true
      make_ready(P, item)
    elseif string.find(verdict, '^routed_') or string.find(verdict, '^evaluated_') then
      is_used = true
      go_elsewhere(P, item)
    else
      if verdict == 'no_credit' then add(K.policy(P, policy), 'no_credit', n) end
      count(P, 'dropped:' .. verdict, n)
      retire(P, item.gid, policy, verdict, item.items, split(item.ids))
    end
  end
  -- A group that is used with k of n is that task's last: requeued, the task would make another of the same id.
  if is_used and f.letter then call('XDEL', K.dead(P), f.letter) end
  if judged then note_completed(P, 'training') end
  for _, role in ipairs(trained_roles(P)) do gather('SREM', K.outstanding(P, role.policy), role.name .. ' ' .. task) end
  leave_queue(P, f.lane, f.entry)
  emit(P, 'work')
  return verdicts
end

-- One complete task's groups are settled. Returns why they cannot be, or nil.
local function settle_task(P, task, groups, tombstone_ms, f)
  local total = 0
  for _, item in ipairs(groups) do total = total + tonumber(item.n) end
  if total ~= tonumber(f.held or 0) then return 'task ' .. task .. ' holds other trajectories than are being settled' end
  local verdicts = settle_groups(P, task, groups, f)
  if #verdicts > 0 then note_all(P, task, verdicts) end
  count(P, 'assembling', -total)
  gather('ZREM', K.settling(P), task)
  call('UNLINK', K.members(P, task))
  entomb(P, task, tombstone_ms)
  return nil
end

-- settle: tombstone ttl ms, the switch of plug-ins that they were judged by, lines of tasks, then task, gid, policy, verdict ('ready', a drop reason or
-- a route), '1' when filters judged it, n, oldest version, sum of rewards, items, ids per group. All groups of a task at once, or none when another server was first. Returns the tasks that were
-- settled, and what is wrong with one that could not be or ''; 0 when other plug-ins hold by now.
SIGNATURE.settle = { 'tombstone_ms', 'switch', 'tasks', each = { 'task', 'gid', 'policy', 'verdict', 'judged', 'n', 'oldest', 'reward_sum', 'items', 'ids' } }
function F.settle(keys, a)
  local P, groups, settled, wrong = keys[1], {}, {}, ''
  if (run_of(P).switch or '0') ~= a.switch then return 0 end
  for _, task in ipairs(split(a.tasks)) do groups[task] = {} end
  for _, item in ipairs(a.each) do table.insert(groups[item.task], item) end
  for _, task in ipairs(split(a.tasks)) do
    local f = call('HMGET', K.task(P, task), 'state', 'letter', 'lane', 'entry', 'held')
    if f[1] == 'complete' then
      local known = { letter = f[2], lane = f[3], entry = f[4], held = f[5] }
      local problem = settle_task(P, task, groups[task], tonumber(a.tombstone_ms), known)
      if problem then wrong = problem else settled[#settled + 1] = task end
    end
  end
  write_judged(P)
  return { settled, wrong }
end

end

-- unsettled: least age ms, limit. Returns complete tasks that nobody settled yet.
SIGNATURE.unsettled = { 'least_age', 'limit' }
function F.unsettled(keys, a)
  return call('ZRANGEBYSCORE', K.settling(keys[1]), '-inf', now_ms() - tonumber(a.least_age), 'LIMIT', 0, tonumber(a.limit))
end
