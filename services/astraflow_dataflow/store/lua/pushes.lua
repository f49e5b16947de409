-- Episodes: one call commits many, each whole, or says why not. The outcome table is section "push" of docs/dataflow.md. Those of one task are
-- taken together, as if they had been pushed one after the other: what they change of it is read once and written once.

-- A block of its own: Lua has room for 200 local names outside.
do

-- Reads what a commit needs to know of a task: its fields, and of each episode the member's and the episode's own.
local function read_task(P, t)
  local names, fields = { 'state', 'attempt', 'size', 'evaluation', 'left', 'node', 'copy', 'leased_ms' }, {}
  -- Perhaps they are all of its members; then nothing of it is read again.
  if #t.episodes > 1 then names[9], names[10], names[11] = 'why', 'credited', 'spec' end
  for _, e in ipairs(t.episodes) do
    names[#names + 1] = 'm' .. e.member
    names[#names + 1] = 'r' .. e.episode
  end
  for i, value in ipairs(call('HMGET', K.task(P, t.id), unpack(names))) do fields[names[i]] = value or nil end
  t.fields, t.is_evaluation = fields, (fields.evaluation or '') ~= ''
end

local function set(t, field, value)
  t.fields[field] = value
  t.set[#t.set + 1] = field
  t.set[#t.set + 1] = value
end

-- Writes what a commit changed of a task. A task that was never leased has no trace until an episode of it is accepted.
local function write_task(P, t, horizon)
  if t.first_accepted then set(t, 'left', t.fields.left) end
  call_many({ 'HSET', K.task(P, t.id) }, t.set)
  call_many({ 'RPUSH', K.members(P, t.id) }, t.headers)
  if #t.owned > 0 then
    gather_all({ 'HSET', K.owners(P) }, t.owned)
    count(P, 'ingested', #t.owned / 2)
    count(P, 'assembling', #t.owned / 2)
  end
  if #t.notes > 0 and note_all(P, t.id, t.notes) == 0 and t.first_accepted then
    local f = call('HMGET', K.task(P, t.id), 'lane', 'entry')
    begin_trace(P, t.id, f[1], f[2], unpack(t.notes, t.first_accepted))
  end
  if t.first_accepted and t.fields.state == 'queued' then open_tasks(P, { now_ms() + horizon, t.id }) end
end

-- What the columns of a trajectory's trace say: id, policy, role, versions, reward.
local function policy_of(item)
  return string.match(item.trace, '^[^\t]*\t([^\t]*)')
end

-- Counts trajectories refused on arrival, once per episode id, and frees what was uploaded for them.
local function turn_away(P, t, e, outcome, reason, detail)
  CALL.turned_away[e.episode] = true
  local known = t.fields.state
  for _, item in ipairs(e.each) do
    -- An accepted push of the same episode owns these bytes.
    if not t.is_evaluation and CALL.owners[item.id] ~= e.episode then
      -- What belongs to no task is refused again each time, and poison is kept elsewhere: neither is archived.
      if known and outcome ~= 'POISON' then
        retire_refused(P, t.id, policy_of(item), reason, item.header, item.id, item.place)
      else
        PACKS.forgo(P, item.place, item.id)
        CALL.has_all = false
      end
    end
  end
  count(P, 'ingested', #e.each)
  count(P, 'dropped:' .. reason, #e.each)
  if outcome == 'POISON' then table.insert(CALL.poison_of, e.node) end
  if known then
    set(t, 'r' .. e.episode, outcome .. ' ' .. (detail or ''))
    t.notes[#t.notes + 1] = episode_entry(e.who, outcome, e.failed or '0', detail or reason, e.each)
  end
  return outcome .. ' ' .. (detail or '')
end

-- What a commit changes of a node, read once and written once; nil for one that never joined.
local function node_of(P, node)
  local n = CALL.nodes[node]
  if n == nil then
    local f = call('HMGET', K.node(P, node), 'incarnation', 'episodes', 'trajectories', 'task_ms')
    n = f[1] and { episodes = tonumber(f[2] or 0), trajectories = tonumber(f[3] or 0), task_ms = tonumber(f[4]) }
    CALL.nodes[node] = n
  end
  return n or nil
end

local function write_nodes(P)
  for node, n in pairs(CALL.nodes) do
    local pace = n and n.done_ms and { 'task_ms', precise(n.task_ms), 'done_ms', n.done_ms } or {}
    if n then call('HSET', K.node(P, node), 'episodes', n.episodes, 'trajectories', n.trajectories, unpack(pace)) end
  end
end

local function credit_node(P, e)
  local n = node_of(P, e.node)
  if n then n.episodes, n.trajectories = n.episodes + 1, n.trajectories + #e.each end
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
    local policy, role, reward = string.match(item.trace, '^[^\t]*\t([^\t]*)\t([^\t]*).*\t([^\t]*)$')
    add_result(E, 'reward ' .. policy .. ' ' .. (role == '' and policy or role), reward)
    if not counted[policy] then call('HINCRBY', E, 'samples ' .. policy, 1) end
    counted[policy] = true
  end
  for _, line in ipairs(split(metrics)) do
    local value, name = string.match(line, '^(%S+) (.+)$')
    if name then add_result(E, 'metric ' .. name, value) end
  end
  if journal ~= '' then call('APPEND', K.evaluation_journal(P, id), journal) end
  count(P, 'ingested', #items)
  count(P, 'evaluated', #items)
end

local function accept_training(P, t, e)
  local owned, headers = t.owned, t.headers
  if e.tool_calls then
    add(K.counters(P), 'tool_calls', e.tool_calls)
    add(K.counters(P), 'tool_errors', e.tool_errors)
  end
  for _, item in ipairs(e.each) do
    PACKS.keep(P, item.place, item.id)
    CALL.owners[item.id] = e.episode
    owned[#owned + 1], owned[#owned + 2] = item.id, item.place
    headers[#headers + 1] = item.header
  end
end

-- The last member came: the lease ends, and of a training task nothing is open any more.
local function close_complete(P, t, e)
  local f = t.fields
  t.last = e
  if not t.is_evaluation then note_pace(P, f, node_of(P, e.node), e.node) end
  if f.state == 'leased' then
    t.notes[#t.notes + 1] = trace_entry('l', f.attempt, 'completed')
    leave_lease(P, t.id, f.node, f.attempt, 'group_closed', e.node)
  end
  end_copy(P, t.id, f.copy, 'group_closed', e.node, 'completed')
  if t.is_evaluation then return end
  move()
  if f.state == 'retry' then gather({ 'ZREM', K.retry(P, TRAIN) }, t.id) end
  set(t, 'state', 'complete')
  set(t, 'why', '')
  gather({ 'ZREM', K.open(P) }, t.id)
  gather({ 'ZADD', K.settling(P) }, now_ms(), t.id)
end

local function end_evaluation_task(P, t)
  local f = call('HMGET', K.task(P, t.id), 'lane', 'entry')
  leave_lane(P, t.id, f[1], f[2])
  entomb(P, t.id, 86400000)
  call('HINCRBY', K.evaluation(P, t.fields.evaluation), t.last.failed == '1' and 'failed' or 'done', 1)
  if t.last.failed ~= '1' then note_completed(P, 'evaluation') end
  finish_evaluation(P, t.fields.evaluation)
end

-- Payloads of an episode that is not committed end by themselves, unless an accepted push owns them.
local function let_expire(P, e)
  for _, item in ipairs(e.each) do
    if CALL.owners[item.id] ~= e.episode then call('EXPIRE', K.payload(P, e.episode, item.id), UNCOMMITTED_S) end
  end
end

-- An episode that got its answer before came with payloads: those that were not there already are not needed.
local function answer_again(P, e, answer)
  for _, item in ipairs(CALL.wrote_all and not CALL.turned_away[e.episode] and e.each or {}) do
    if CALL.owners[item.id] ~= e.episode then call('UNLINK', K.payload(P, e.episode, item.id)) end
  end
  return answer
end

-- Why a stored payload or an id forbids the commit: 'RETRY', 'POISON', or nil.
local function unusable(P, e)
  for _, item in ipairs(e.each) do
    if CALL.owners[item.id] then return 'POISON' end
  end
  for _, item in ipairs(not CALL.has_all and e.each or {}) do
    if not PACKS.is_stored(P, item.place, item.id) then return 'RETRY' end
  end
  return nil
end

local function accept(P, t, e)
  local f, left = t.fields, tonumber(t.fields.left) - 1
  set(t, 'm' .. e.member, (e.failed == '1' and 'x' or 'f') .. e.episode)
  f.left = left
  if t.is_evaluation then accept_evaluation(P, f.evaluation, e.each, e.metrics, e.journal) else accept_training(P, t, e) end
  credit_node(P, e)
  local late = e.hedge ~= '1' and tonumber(e.attempt) < tonumber(f.attempt)
  local outcome = late and 'ACCEPTED_LATE' or 'ACCEPTED'
  t.notes[#t.notes + 1] = episode_entry(e.who, outcome, e.failed or '0', '', e.each)
  t.first_accepted = t.first_accepted or #t.notes
  if left == 0 then close_complete(P, t, e) end
  return outcome .. ' '
end

-- What becomes of one episode: outcome and detail, with a space between.
local function commit_episode(P, t, e)
  local f = t.fields
  if not f.state then return turn_away(P, t, e, 'LATE_CLOSED', 'late_closed', 'unknown_task') end
  local member, refused = f['m' .. e.member], f['r' .. e.episode]
  if member and string.sub(member, 2) == e.episode then return answer_again(P, e, 'DUPLICATE ') end
  if refused then return answer_again(P, e, refused) end
  -- The straggler may yet do better.
  if e.hedge == '1' and e.failed == '1' then return turn_away(P, t, e, 'SUPERSEDED', 'superseded', 'failed_copy') end
  if tonumber(e.member) >= tonumber(f.size) then return turn_away(P, t, e, 'POISON', 'poison', 'member_out_of_range') end
  if member then
    if e.hedge ~= '1' and tonumber(e.attempt) < tonumber(f.attempt) then return turn_away(P, t, e, 'FENCED', 'fenced') end
    return turn_away(P, t, e, 'SUPERSEDED', 'superseded')
  end
  local run = run_of(P).state
  if not is_open(f.state) or run == 'finished' or (run == 'finishing' and not t.is_evaluation) then
    return turn_away(P, t, e, 'LATE_CLOSED', 'late_closed')
  end
  local bad = not t.is_evaluation and unusable(P, e)
  if bad == 'RETRY' then
    let_expire(P, e)
    return 'RETRY '
  end
  if bad == 'POISON' then return turn_away(P, t, e, 'POISON', 'poison', 'duplicate_id') end
  return accept(P, t, e)
end

-- Commits the episodes of one task. Returns it when this completed it and it waits to be settled.
local function commit_task(P, t, horizon)
  local f = t.fields
  local is_whole = f.spec and f.left == f.size
  for _, e in ipairs(t.episodes) do e.reply = commit_episode(P, t, e) end
  write_task(P, t, horizon)
  if not t.last then return {} end
  if t.is_evaluation then
    end_evaluation_task(P, t)
    return {}
  end
  -- The caller has the headers of one that came as a whole.
  return is_whole and complete_task(t.id, f, '') or complete_task_of(P, t.id, f.size)
end

-- Does something with each task; a defect in what is stored of one answers its episodes, and costs the others nothing.
local function with_each(tasks, work)
  for _, t in ipairs(tasks) do
    local ok, problem = pcall(work, t)
    if not ok then t.problem = t.problem or 'ERROR ' .. (type(problem) == 'table' and problem.err or tostring(problem)) end
  end
end

-- Who owns the trajectories of a commit, and whether all of its payloads are stored.
local function read_stored(P, tasks, mark)
  CALL.wrote_all = mark ~= '' and call('UNLINK', K.written(P, mark)) == 1
  local ids, payloads, num_stored = {}, {}, 0
  CALL.owners = {}
  for _, t in ipairs(tasks) do
    for _, e in ipairs(t.is_evaluation and {} or t.episodes) do
      for _, item in ipairs(e.each) do
        ids[#ids + 1] = item.id
        if not (CALL.wrote_all or CALL.pack) then payloads[#payloads + 1] = K.payload(P, e.episode, item.id) end
      end
    end
  end
  for i, owner in ipairs(call_many({ 'HMGET', K.owners(P) }, ids)) do
    if owner then CALL.owners[ids[i]] = PACKS.episode_of(owner) end
  end
  for _, n in ipairs(call_many({ 'EXISTS' }, payloads)) do num_stored = num_stored + n end
  CALL.has_all = CALL.wrote_all or (num_stored == #payloads and CALL.has_pack ~= false)
end

-- commit: horizon ms, mark that was written with the payloads or '', pack and sizes of payloads that are outside or '', then per episode: task; member,
-- attempt, node and episode, tab separated; the number n of its trajectories, with 'h' for a hedge, 'f' for one that failed, 'e' for one of an
-- evaluation, 't' and two numbers for its calls of tools and those that failed; of one of an evaluation metrics as lines of value and name, and lines for its journal; header and trace of each of the n. Returns the position,
-- outcome and detail of each episode with a space between, and the tasks that it completed and that wait to be settled.
SIGNATURE.commit = {}
function SIGNATURE.commit.read(values)
  local each, at = {}, 4
  while values[at] do
    local who, how = values[at + 1], values[at + 2]
    local member, attempt, node, episode = string.match(who, '^([^\t]*)\t([^\t]*)\t([^\t]*)\t(.*)$')
    local items, n = {}, tonumber(how)
    local e = { task = values[at], who = who, member = member, attempt = attempt, node = node, episode = episode, each = items }
    at = at + 3
    if not n then
      n = tonumber(string.match(how, '^%d+'))
      if string.find(how, 'h') then e.hedge = '1' end
      if string.find(how, 'f') then e.failed = '1' end
      local calls, errors = string.match(how, 't(%d+),(%d+)')
      e.tool_calls, e.tool_errors = tonumber(calls), tonumber(errors)
      if string.find(how, 'e') then e.metrics, e.journal, at = values[at], values[at + 1], at + 2 end
    end
    for i = 1, n do
      local trace = values[at + 1]
      items[i] = { id = string.match(trace, '^[^\t]*'), place = episode, header = values[at], trace = trace }
      at = at + 2
    end
    each[#each + 1] = e
  end
  return { horizon = values[1], mark = values[2], packed = values[3], each = each }
end
-- Here and not by the caller, which may have been cancelled since it sent the payloads.
function SIGNATURE.commit.without_run(P, a)
  if a.packed ~= '' then return end
  call('UNLINK', K.written(P, a.mark))
  for _, e in ipairs(a.each) do
    for _, item in ipairs(e.each) do call('UNLINK', K.payload(P, e.episode, item.id)) end
  end
end
function F.commit(keys, a)
  local P, tasks, replies, completed = keys[1], {}, {}, {}
  CALL.poison_of, CALL.nodes, CALL.turned_away = {}, {}, {}
  PACKS.place_all(P, a.each, a.packed)
  for _, e in ipairs(a.each) do
    if not tasks[e.task] then
      tasks[e.task] = { id = e.task, episodes = {}, set = {}, headers = {}, owned = {}, notes = {} }
      tasks[#tasks + 1] = tasks[e.task]
    end
    table.insert(tasks[e.task].episodes, e)
  end
  with_each(tasks, function(t) read_task(P, t) end)
  read_stored(P, tasks, a.mark)
  with_each(tasks, function(t)
    local complete = commit_task(P, t, tonumber(a.horizon))
    if complete[1] then completed[#completed + 1] = complete end
  end)
  for i, e in ipairs(a.each) do
    local problem = tasks[e.task].problem
    replies[i] = problem or e.reply
    if problem then let_expire(P, e) end
  end
  PACKS.hold_rest(P)
  local at = position(P, CALL.moved)
  -- To drain a node gives back its leases: not before what else is said of their tasks is written.
  write_nodes(P)
  write_gathered(P)
  for _, node in ipairs(CALL.poison_of) do note_poison(P, node) end
  return { at, replies, completed }
end

-- quarantine: task, member, episode, node, reason, detail, number of trajectories, sample, attempt. Idempotent per episode id.
-- An episode that was accepted or refused before keeps its first answer. Returns { outcome, detail, position }.
SIGNATURE.quarantine = { 'task', 'member', 'episode', 'node', 'reason', 'detail', 'num_trajectories', 'sample', 'attempt' }
function F.quarantine(keys, a)
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
    local who = table.concat({ a.member, a.attempt, a.node, episode }, '\t')
    note_all(P, task, { episode_entry(who, 'POISON', '0', a.reason, {}) })
  end
  note_poison(P, a.node)
  call('XADD', K.poison(P), 'MAXLEN', '~', MAX.poison, '*', 'task', task, 'episode', episode, 'node', a.node,
    'reason', a.reason, 'detail', a.detail, 'sample', a.sample)
  return { 'POISON', a.reason, position(P, true) }
end

end
