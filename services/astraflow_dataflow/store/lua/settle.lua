-- Groups: what becomes of a complete task. The server reads the members, asks the filters and calls settle; a crash in
-- between leaves the task in `settling`, where any server finds it again.

-- A complete task as { why, credited, size, finished, { id, header, id, header... }, spec }, or {} when it is not complete.
local function complete_task_of(P, task)
  local T = K.task(P, task)
  local f = call('HMGET', T, 'state', 'why', 'credited', 'size', 'spec')
  if f[1] ~= 'complete' then return {} end
  local finished, names = 0, {}
  for i = 0, tonumber(f[4]) - 1 do names[#names + 1] = 'm' .. i end
  for _, member in ipairs(call('HMGET', T, unpack(names))) do
    if member and string.sub(member, 1, 1) == 'f' then finished = finished + 1 end
  end
  return { f[2] or '', f[3] or '*', f[4], finished, call('HGETALL', K.members(P, task)), f[5] }
end

-- members: task. Returns a complete task, or {}.
SIGNATURE.members = { 'task' }
local function members(keys, a)
  return complete_task_of(keys[1], a.task)
end

local function judge(P, policy, kept, sum, n)
  local Q = K.policy(P, policy)
  local f = call('HMGET', Q, 'acceptance', 'smoothing', 'groups_per_step')
  local average = tonumber(f[1])
  call('HSET', Q, 'acceptance', precise(average + tonumber(f[2]) * ((kept and 1 or 0) - average)))
  call('LPUSH', K.recent(P, policy), sum .. ' ' .. n)
  call('LTRIM', K.recent(P, policy), 0, tonumber(f[3]) - 1)
end

local function make_ready(P, task, gid, policy, n, oldest, items, ids)
  local arrival = call('HINCRBY', K.run(P), 'arrivals', 1)
  -- Earliest deadline first: the oldest version decides, arrival breaks ties.
  local score = tonumber(oldest) * 4294967296 + arrival
  call('HSET', K.group(P, gid), 'policy', policy, 'task', task, 'n', n, 'oldest', oldest, 'items', items,
    'ids', ids, 'score', precise(score))
  call('ZADD', K.ready(P, policy), precise(score), gid)
  count(P, 'ready', n)
  emit(P, 'ready ' .. policy)
end

-- settle: task, tombstone ttl ms, then gid, policy, verdict ('ready' or a drop reason), '1' when filters judged it, n, oldest version,
-- sum of rewards, items, ids per group. Atomic, and does nothing when another server was first. Returns 1 when it acted.
SIGNATURE.settle = { 'task', 'tombstone_ms', each = { 'gid', 'policy', 'verdict', 'judged', 'n', 'oldest', 'reward_sum', 'items', 'ids' } }
local function settle(keys, a)
  local P, task = keys[1], a.task
  if call('HGET', K.task(P, task), 'state') ~= 'complete' then return 0 end
  local total, judged = 0, false
  for _, item in ipairs(a.each) do total = total + tonumber(item.n) end
  if total ~= call('HLEN', K.members(P, task)) then
    return refuse('DEFECT', 'task ' .. task .. ' holds other trajectories than are being settled')
  end
  for _, item in ipairs(a.each) do
    local gid, policy, verdict, n = item.gid, item.policy, item.verdict, tonumber(item.n)
    note_group(P, gid, 'G', verdict)
    call('HINCRBY', K.policy(P, policy), 'settled', n)
    if item.judged == '1' then judge(P, policy, verdict == 'ready', item.reward_sum, n) end
    judged = judged or item.judged == '1'
    if verdict == 'ready' then
      make_ready(P, task, gid, policy, n, item.oldest, item.items, item.ids)
    else
      if verdict == 'no_credit' then call('HINCRBY', K.policy(P, policy), 'no_credit', n) end
      count(P, 'dropped:' .. verdict, n)
      forget(P, split(item.ids))
    end
  end
  if judged then note_completed(P, 'training') end
  count(P, 'assembling', -total)
  for _, role in ipairs(trained_roles(P)) do call('SREM', K.outstanding(P, role.policy), role.name .. ' ' .. task) end
  leave_lane(P, task)
  call('ZREM', K.settling(P), task)
  entomb(P, task, tonumber(a.tombstone_ms))
  emit(P, 'work')
  return 1
end

-- unsettled: least age ms, limit. Returns complete tasks that nobody settled yet.
SIGNATURE.unsettled = { 'least_age', 'limit' }
local function unsettled(keys, a)
  return call('ZRANGEBYSCORE', K.settling(keys[1]), '-inf', now_ms() - tonumber(a.least_age), 'LIMIT', 0, tonumber(a.limit))
end
