-- Episodes: one call commits a whole episode, or says why not. The outcome table is section "push" of docs/dataflow.md.

-- Counts trajectories refused on arrival, once per episode id, and frees what was uploaded for them. `a` is what commit was called with.
local function turn_away(P, a, known, outcome, reason, items, detail)
  local n, task, episode = 0, a.task, a.episode
  for _, item in ipairs(items) do
    -- An accepted push of the same episode owns these bytes.
    local owned = call('HGET', K.owners(P), item.id) == episode
    if item.stored and not owned then call('UNLINK', K.payload(P, episode, item.id)) end
    n = n + 1
  end
  count(P, 'ingested', n)
  count(P, 'dropped:' .. reason, n)
  if known then
    call('HSET', K.task(P, task), 'r' .. episode, outcome .. ' ' .. (detail or ''))
    note_episode(P, task, a.member, a.attempt, a.node, episode, outcome, a.failed, detail or reason, items)
  end
  return { outcome, detail or '', {}, position(P, true) }
end

local function credit_node(P, node, items)
  if call('SISMEMBER', K.nodes(P), node) == 1 then
    call('HINCRBY', K.node(P, node), 'episodes', 1)
    if #items > 0 then call('HINCRBY', K.node(P, node), 'trajectories', #items) end
  end
end

local MAX_EVALUATION_FIELDS = 512

-- Adds to a sum and to how many there are, as long as a pass has room for another name.
local function add_result(E, name, value)
  if call('HEXISTS', E, 'n ' .. name) == 0 and call('HLEN', E) >= MAX_EVALUATION_FIELDS then return end
  call('HINCRBY', E, 'n ' .. name, 1)
  call('HSET', E, 's ' .. name, precise(tonumber(call('HGET', E, 's ' .. name) or 0) + tonumber(value)))
end

local function accept_evaluation(P, id, items, metrics, journal)
  local E, counted = K.evaluation(P, id), {}
  for _, item in ipairs(items) do
    local role = string.match(item.trace, '^[^\t]*\t[^\t]*\t([^\t]*)')
    add_result(E, 'reward ' .. item.policy .. ' ' .. (role == '' and item.policy or role), item.reward)
    if not counted[item.policy] then call('HINCRBY', E, 'samples ' .. item.policy, 1) end
    counted[item.policy] = true
  end
  for _, line in ipairs(split(metrics)) do
    local value, name = string.match(line, '^(%S+) (.+)$')
    if name then add_result(E, 'metric ' .. name, value) end
  end
  if journal ~= '' then call('APPEND', K.evaluation_journal(P, id), journal) end
  count(P, 'ingested', #items)
  count(P, 'evaluated', #items)
end

local function accept_training(P, task, episode, items)
  for _, item in ipairs(items) do
    call('PERSIST', K.payload(P, episode, item.id))
    call('HSET', K.owners(P), item.id, episode)
    call('HSET', K.members(P, task), item.id, item.header)
  end
  count(P, 'ingested', #items)
  count(P, 'assembling', #items)
end

-- Ends a task whose last member came. Returns it when the caller must settle it, else {}.
local function complete_task(P, task, evaluation, failed, node)
  end_lease(P, task, 'group_closed', node, 'completed')
  if evaluation ~= '' then
    leave_lane(P, task)
    entomb(P, task, 86400000)
    call('HINCRBY', K.evaluation(P, evaluation), failed and 'failed' or 'done', 1)
    if not failed then note_completed(P, 'evaluation') end
    finish_evaluation(P, evaluation)
    return {}
  end
  call('HSET', K.task(P, task), 'state', 'complete', 'why', '')
  call('ZREM', K.open(P), task)
  call('ZREM', K.retry(P, TRAIN), task)
  call('ZADD', K.settling(P), now_ms(), task)
  return complete_task_of(P, task)
end

-- Why a stored payload or an id forbids the commit: 'RETRY', 'POISON', or nil.
local function unusable(P, episode, items)
  for _, item in ipairs(items) do
    if call('HEXISTS', K.owners(P), item.id) == 1 then return 'POISON' end
  end
  for _, item in ipairs(items) do
    if call('EXISTS', K.payload(P, episode, item.id)) == 0 then return 'RETRY' end
  end
  return nil
end

-- commit: task, member, attempt, episode, node, '1' hedge, '1' failed, horizon ms, metrics of an evaluation as lines of value and name, lines for its journal, then id, policy, reward, header, trace
-- per trajectory. Returns { outcome, detail, the task when this completed it and it waits to be settled, position }.
SIGNATURE.commit = { 'task', 'member', 'attempt', 'episode', 'node', 'hedge', 'failed', 'horizon', 'metrics', 'journal', each = { 'id', 'policy', 'reward', 'header', 'trace' } }
-- Here and not by the caller, which may have been cancelled since it sent the payloads.
function SIGNATURE.commit.without_run(P, a)
  for _, item in ipairs(a.each) do call('UNLINK', K.payload(P, a.episode, item.id)) end
end
local function commit(keys, a)
  local P, task, episode, node = keys[1], a.task, a.episode, a.node
  local T, items = K.task(P, task), a.each
  local f = call('HMGET', T, 'state', 'attempt', 'size', 'evaluation', 'm' .. a.member, 'r' .. episode)
  local state, member = f[1], f[5]
  local is_evaluation = f[4] and f[4] ~= ''
  for _, item in ipairs(items) do item.stored = not is_evaluation end
  if not state then return turn_away(P, a, false, 'LATE_CLOSED', 'late_closed', items, 'unknown_task') end
  if member and string.sub(member, 2) == episode then return { 'DUPLICATE', '', {}, position(P, false) } end
  if f[6] then
    local outcome, detail = string.match(f[6], '^(%S+) (.*)$')
    return { outcome, detail, {}, position(P, false) }
  end
  if tonumber(a.member) >= tonumber(f[3]) then
    return turn_away(P, a, true, 'POISON', 'poison', items, 'member_out_of_range')
  end
  if member then
    if a.hedge ~= '1' and tonumber(a.attempt) < tonumber(f[2]) then
      return turn_away(P, a, true, 'FENCED', 'fenced', items)
    end
    return turn_away(P, a, true, 'SUPERSEDED', 'superseded', items)
  end
  local run = call('HGET', K.run(P), 'state')
  if not is_open(state) or run == 'finished' or (run == 'finishing' and not is_evaluation) then
    return turn_away(P, a, true, 'LATE_CLOSED', 'late_closed', items)
  end
  local bad = not is_evaluation and unusable(P, episode, items)
  if bad == 'RETRY' then return { 'RETRY', '', {}, 0 } end
  if bad == 'POISON' then return turn_away(P, a, true, 'POISON', 'poison', items, 'duplicate_id') end
  call('HSET', T, 'm' .. a.member, (a.failed == '1' and 'x' or 'f') .. episode)
  if is_evaluation then accept_evaluation(P, f[4], items, a.metrics, a.journal) else accept_training(P, task, episode, items) end
  credit_node(P, node, items)
  local late = a.hedge ~= '1' and tonumber(a.attempt) < tonumber(f[2])
  local outcome, settle = late and 'ACCEPTED_LATE' or 'ACCEPTED', {}
  open_trace(P, task)
  note_episode(P, task, a.member, a.attempt, node, episode, outcome, a.failed, '', items)
  if call('HINCRBY', T, 'left', -1) == 0 then
    settle = complete_task(P, task, f[4], a.failed == '1', node)
  else
    call('ZADD', K.open(P), 'NX', now_ms() + tonumber(a.horizon), task)
  end
  return { outcome, '', settle, position(P, true) }
end

-- quarantine: task, member, episode, node, reason, detail, number of trajectories, sample, attempt. Idempotent per episode id.
-- An episode that was accepted or refused before keeps its first answer. Returns { outcome, detail, position }.
SIGNATURE.quarantine = { 'task', 'member', 'episode', 'node', 'reason', 'detail', 'num_trajectories', 'sample', 'attempt' }
local function quarantine(keys, a)
  local P, task, episode = keys[1], a.task, a.episode
  local f = call('HMGET', K.task(P, task), 'state', 'm' .. a.member, 'r' .. episode)
  if f[2] and string.sub(f[2], 2) == episode then return { 'DUPLICATE', '', position(P, false) } end
  if f[3] then
    local outcome, detail = string.match(f[3], '^(%S+) (.*)$')
    return { outcome, detail, position(P, false) }
  end
  count(P, 'ingested', tonumber(a.num_trajectories))
  count(P, 'dropped:poison', tonumber(a.num_trajectories))
  if f[1] then
    call('HSET', K.task(P, task), 'r' .. episode, 'POISON ' .. a.reason)
    note_episode(P, task, a.member, a.attempt, a.node, episode, 'POISON', '0', a.reason, {})
  end
  if call('SISMEMBER', K.nodes(P), a.node) == 1 then call('HINCRBY', K.node(P, a.node), 'poisoned', 1) end
  call('XADD', K.poison(P), 'MAXLEN', '~', MAX_POISON, '*', 'task', task, 'episode', episode, 'node', a.node,
    'reason', a.reason, 'detail', a.detail, 'sample', a.sample)
  return { 'POISON', a.reason, position(P, true) }
end
