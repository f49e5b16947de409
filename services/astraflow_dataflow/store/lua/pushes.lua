-- Episodes: one call commits many, each whole, or says why not. The outcome table is section "push" of docs/dataflow.md. Those of one task are
-- taken together, as if they had been pushed one after the other: what they change of it is read once and written once.
--
-- They come in pushes: episodes of one attempt at a task by one node, that are alike. Most are taken as a whole (`accept_all`); where one of them meets
-- something, each is looked at by itself (`commit_episode`).

-- A block of its own: Lua has room for 200 local names outside.
do

-- Headers as they are sent and stored, each behind its size in four bytes: a list of them with their sizes, and one without.
local function headers_of(text)
  local framed, plain, at = {}, {}, 1
  while at <= #text do
    local size = struct.unpack('>I4', text, at)
    framed[#framed + 1], plain[#plain + 1] = string.sub(text, at, at + 3 + size), string.sub(text, at + 4, at + 3 + size)
    at = at + 4 + size
  end
  return framed, plain
end

-- The episode that a trajectory of a push is of, by the trajectory's place.
local function whose(p, i)
  return p.names[math.ceil(i / p.each)]
end

-- The episodes of a push, each by itself.
local function episodes_of(p)
  if p.episodes then return p.episodes end
  p.episodes = {}
  local traces, lines_of, framed, plain = split(p.traces), split(p.who), headers_of(p.headers)
  for i, episode in ipairs(p.names) do
    local calls, errors = string.match(lines_of[i], '\t(%d+),(%d+)$')
    local e = { member = p.members[i], episode = episode, attempt = p.attempt, node = p.node, hedge = p.hedge, failed = p.failed, who = lines_of[i],
      tool_calls = tonumber(calls), tool_errors = tonumber(errors), each = {} }
    if p.results then e.metrics, e.journal = p.results[2 * i - 1], p.results[2 * i] end
    for at = (i - 1) * p.each + 1, i * p.each do
      e.each[#e.each + 1] = { id = p.ids[at], place = p.places[at] or episode, header = plain[at], framed = framed[at], trace = traces[at] }
    end
    p.episodes[i] = e
  end
  return p.episodes
end

-- Notes an episode in its task's trace.
local function note_episode(t, e, outcome, reason)
  local traces = {}
  for i, item in ipairs(e.each) do traces[i] = item.trace end
  t.notes[#t.notes + 1] = push_entry(e, outcome, reason, e.who, lines(traces))
end

-- Adds the fields that say who has the members of some pushes, and what became of their episodes before.
local function add_own(names, pushes)
  for _, p in ipairs(pushes) do
    for i, episode in ipairs(p.names) do names[#names + 1], names[#names + 2] = 'm' .. p.members[i], 'r' .. episode end
  end
end

-- Reads what a commit needs to know of a task. What is said of members and episodes is read where something of the task came before; of a single
-- episode at once.
local function read_task(P, t)
  local names, fields = { 'state', 'attempt', 'size', 'evaluation', 'left', 'held', 'node', 'copy', 'leased_ms', 'whole', 'refused' }, {}
  local is_single = not t.pushes[2] and t.pushes[1].n == 1
  local function read()
    for i, value in ipairs(call_many({ 'HMGET', K.task(P, t.id) }, names)) do fields[names[i]] = value or nil end
  end
  -- Several are perhaps all of its members; then nothing of it is read again.
  if is_single then add_own(names, t.pushes) else names[12], names[13], names[14] = 'why', 'credited', 'spec' end
  read()
  t.is_evaluation, t.is_fresh = (fields.evaluation or '') ~= '', fields.left == fields.size
  t.is_untouched = t.is_fresh and not fields.refused
  if not (t.is_untouched or is_single) then
    names = {}
    add_own(names, t.pushes)
    read()
  end
  t.fields = fields
end

local function set(t, field, value)
  t.fields[field] = value
  t.set[#t.set + 1] = field
  t.set[#t.set + 1] = value
end

-- Writes what a commit changed of a task. A task that was never leased has no trace until an episode of it is accepted.
local function write_task(P, t, horizon)
  if t.first_accepted then
    set(t, 'left', t.fields.left)
    if not t.is_evaluation then set(t, 'held', t.fields.held) end
  end
  call_many({ 'HSET', K.task(P, t.id) }, t.set)
  call_many({ 'RPUSH', K.members(P, t.id) }, t.headers)
  if #t.owned > 0 then
    gather_all('HSET', K.owners(P), t.owned)
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
    set(t, 'refused', 1)
    note_episode(t, e, outcome, detail or reason)
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

local function credit_node(P, node, num_episodes, num_trajectories)
  local n = node_of(P, node)
  if n then n.episodes, n.trajectories = n.episodes + num_episodes, n.trajectories + num_trajectories end
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

local function count_tools(P, e)
  if not e.tool_calls then return end
  add(K.counters(P), 'tool_calls', e.tool_calls)
  add(K.counters(P), 'tool_errors', e.tool_errors)
end

local function accept_training(P, t, e)
  local owned, headers = t.owned, t.headers
  count_tools(P, e)
  for _, item in ipairs(e.each) do
    PACKS.keep(P, item.place, item.id)
    CALL.owners[item.id] = e.episode
    owned[#owned + 1], owned[#owned + 2] = item.id, item.place
    headers[#headers + 1] = item.framed
  end
  t.fields.held = (t.fields.held or 0) + #e.each
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
  if f.state == 'retry' then gather('ZREM', K.retry(P, TRAIN), t.id) end
  set(t, 'state', 'complete')
  set(t, 'why', '')
  gather('ZREM', K.open(P), t.id)
  gather('ZADD', K.settling(P), now_ms(), t.id)
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

local function accepted_as(t, e)
  local late = e.hedge ~= '1' and tonumber(e.attempt) < tonumber(t.fields.attempt)
  return late and 'ACCEPTED_LATE' or 'ACCEPTED'
end

local function accept(P, t, e)
  local f, left = t.fields, tonumber(t.fields.left) - 1
  set(t, 'm' .. e.member, (e.failed == '1' and 'x' or 'f') .. e.episode)
  f.left = left
  if t.is_evaluation then accept_evaluation(P, f.evaluation, e.each, e.metrics, e.journal) else accept_training(P, t, e) end
  credit_node(P, e.node, 1, #e.each)
  local outcome = accepted_as(t, e)
  note_episode(t, e, outcome, '')
  t.first_accepted = t.first_accepted or #t.notes
  if left == 0 then close_complete(P, t, e) end
  return outcome .. ' '
end

-- Whether a task takes episodes.
local function takes_more(P, t)
  local run = run_of(P).state
  return is_open(t.fields.state) and run ~= 'finished' and (run ~= 'finishing' or t.is_evaluation)
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
  if not takes_more(P, t) then return turn_away(P, t, e, 'LATE_CLOSED', 'late_closed') end
  local bad = not t.is_evaluation and unusable(P, e)
  if bad == 'RETRY' then
    let_expire(P, e)
    return 'RETRY '
  end
  if bad == 'POISON' then return turn_away(P, t, e, 'POISON', 'poison', 'duplicate_id') end
  return accept(P, t, e)
end

-- Whether no episode of a push meets anything of its task, nor a trajectory another's.
local function meets_nothing(P, t, p)
  local f = t.fields
  if p.is_special or t.is_evaluation or not (CALL.wrote_all or CALL.has_pack) or not takes_more(P, t) then return false end
  for i, member in ipairs(p.members) do
    if tonumber(member) >= tonumber(f.size) or not t.is_untouched and (f['m' .. member] or f['r' .. p.names[i]]) then return false end
  end
  for _, id in ipairs(p.ids) do
    if CALL.owners[id] then return false end
  end
  return true
end

-- The usual case: takes all episodes of a push.
local function accept_all(P, t, p)
  local f, num_owned = t.fields, #t.owned
  if t.is_untouched and p.n == tonumber(f.size) then
    set(t, 'whole', p.who)
  else
    for i, member in ipairs(p.members) do set(t, 'm' .. member, 'f' .. p.names[i]) end
  end
  for i, id in ipairs(p.ids) do
    t.owned[num_owned + 2 * i - 1], t.owned[num_owned + 2 * i] = id, p.places[i] or whose(p, i)
  end
  t.headers[#t.headers + 1] = p.headers
  f.left, f.held = tonumber(f.left) - p.n, (f.held or 0) + #p.ids
  if CALL.has_pack then CALL.held = CALL.held + #p.ids end
  count_tools(P, p)
  credit_node(P, p.node, p.n, #p.ids)
  local outcome = accepted_as(t, p)
  t.notes[#t.notes + 1] = push_entry(p, outcome, '', p.who, p.traces)
  t.first_accepted = t.first_accepted or #t.notes
  if f.left == 0 then close_complete(P, t, p) end
  return outcome .. ' '
end

-- What becomes of a push: an answer for all of its episodes, or one of each.
local function commit_push(P, t, p)
  if t.fields.state and meets_nothing(P, t, p) then return accept_all(P, t, p) end
  local replies = {}
  read_whole(t.fields)
  for i, e in ipairs(episodes_of(p)) do replies[i] = commit_episode(P, t, e) end
  return replies
end

-- Commits the episodes of one task. Returns it when this completed it and it waits to be settled.
local function commit_task(P, t, horizon)
  local f = t.fields
  for _, p in ipairs(t.pushes) do p.reply = commit_push(P, t, p) end
  write_task(P, t, horizon)
  if not t.last then return {} end
  if t.is_evaluation then
    end_evaluation_task(P, t)
    return {}
  end
  -- The caller has the headers of one that came as a whole.
  return t.is_fresh and f.spec and complete_task(t.id, f, '') or complete_task_of(P, t.id, f.size)
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
    for _, p in ipairs(t.is_evaluation and {} or t.pushes) do
      for i, id in ipairs(p.ids) do
        ids[#ids + 1] = id
        if not (CALL.wrote_all or CALL.pack) then payloads[#payloads + 1] = K.payload(P, whose(p, i), id) end
      end
    end
  end
  for i, owner in ipairs(call_many({ 'HMGET', K.owners(P) }, ids)) do
    if owner then CALL.owners[ids[i]] = PACKS.episode_of(owner) end
  end
  for _, n in ipairs(call_many({ 'EXISTS' }, payloads)) do num_stored = num_stored + n end
  CALL.has_all = CALL.wrote_all or (num_stored == #payloads and CALL.has_pack ~= false)
end

-- Gives each trajectory of a commit its place outside; `packed` is the pack and the size of each payload in order, or '' where all stay inside.
local function place_all(P, pushes, packed)
  if packed == '' then return end
  local words, offset = string.gmatch(packed, '%S+'), 0
  local pack = words()
  for _, p in ipairs(pushes) do
    for i = 1, #p.ids do
      local size = words()
      p.places[i] = whose(p, i) .. ' ' .. pack .. ' ' .. offset .. ' ' .. size
      offset = offset + size
    end
  end
  PACKS.begin(P, pack)
end

-- commit: horizon ms, mark that was written with the payloads or '', pack and sizes of payloads that are outside or '', then per push: task, attempt,
-- node, how, who, traces, headers. `how` is the number of episodes and of trajectories of each, with 'h' for hedges, 'f' for what failed, 'e' for
-- an evaluation's, 'd' where a member or an id comes twice in this call, 't' and two numbers for calls of tools and those that failed. `who` has a line of
-- each episode: member, id and, where there are any, its calls of tools and those that failed; `traces` one of each trajectory: id, policy, role,
-- versions, reward. Of an evaluation's episodes each has two more values: metrics as lines of value and name, and lines for its journal. Returns the
-- position, of each push an answer for all of its episodes or one of each, outcome and detail with a space between, and the tasks that were completed
-- and wait to be settled.
SIGNATURE.commit = {}
function SIGNATURE.commit.read(values)
  local pushes, at = {}, 4
  while values[at] do
    local n, each, flags = string.match(values[at + 3], '^(%d+) (%d+)(.*)$')
    local p = { task = values[at], attempt = values[at + 1], node = values[at + 2], n = tonumber(n), each = tonumber(each), who = values[at + 4],
      traces = values[at + 5], headers = values[at + 6], members = {}, names = {}, ids = {}, places = {} }
    at = at + 7
    for member, episode in string.gmatch(p.who, '(%d+)\t([^\t\n]+)[^\n]*') do
      p.members[#p.members + 1], p.names[#p.names + 1] = member, episode
    end
    for id in string.gmatch(p.traces, '([^\t\n]+)[^\n]*') do p.ids[#p.ids + 1] = id end
    if flags ~= '' then
      p.hedge, p.failed = string.find(flags, 'h') and '1', string.find(flags, 'f') and '1'
      p.is_special = string.find(flags, '[hfed]') ~= nil
      local calls, errors = string.match(flags, 't(%d+),(%d+)')
      p.tool_calls, p.tool_errors = tonumber(calls), tonumber(errors)
      if string.find(flags, 'e') then
        p.results = { unpack(values, at, at + 2 * p.n - 1) }
        at = at + 2 * p.n
      end
    end
    pushes[#pushes + 1] = p
  end
  return { horizon = values[1], mark = values[2], packed = values[3], pushes = pushes }
end
-- Here and not by the caller, which may have been cancelled since it sent the payloads.
function SIGNATURE.commit.without_run(P, a)
  if a.packed ~= '' then return end
  call('UNLINK', K.written(P, a.mark))
  for _, p in ipairs(a.pushes) do
    for i, id in ipairs(p.ids) do call('UNLINK', K.payload(P, whose(p, i), id)) end
  end
end
function F.commit(keys, a)
  local P, tasks, replies, completed = keys[1], {}, {}, {}
  CALL.poison_of, CALL.nodes, CALL.turned_away = {}, {}, {}
  place_all(P, a.pushes, a.packed)
  for _, p in ipairs(a.pushes) do
    if not tasks[p.task] then
      tasks[p.task] = { id = p.task, pushes = {}, set = {}, headers = {}, owned = {}, notes = {} }
      tasks[#tasks + 1] = tasks[p.task]
    end
    table.insert(tasks[p.task].pushes, p)
  end
  with_each(tasks, function(t) read_task(P, t) end)
  read_stored(P, tasks, a.mark)
  with_each(tasks, function(t)
    local complete = commit_task(P, t, tonumber(a.horizon))
    if complete[1] then completed[#completed + 1] = complete end
  end)
  for i, p in ipairs(a.pushes) do
    local problem = tasks[p.task].problem
    replies[i] = problem or p.reply
    for _, e in ipairs(problem and episodes_of(p) or {}) do let_expire(P, e) end
  end
  PACKS.hold_rest(P)
  local at = position(P, CALL.moved)
  -- To drain a node gives back its leases: not before what else is said of their tasks is written.
  write_nodes(P)
  write_gathered(P)
  for _, node in ipairs(CALL.poison_of) do note_poison(P, node) end
  return { at, replies, completed }
end

-- Whether a task is as when its groups were judged: leased to the node that pushes it, with nothing of it here yet, and credit for all of its roles.
local function is_as_judged(t)
  local f = t.fields
  return f.state == 'leased' and f.left == f.size and tonumber(f.size) == #t.names and f.attempt == t.attempt and f.node == t.node
    and not (f.refused or f.uncredited or string.find(f.copy or '', ' '))
end

-- Reads the tasks of a call; those that are not as they were judged, or have a trajectory that is here, are left out.
local function read_judged(P, tasks)
  local names, ids, at = { 'state', 'left', 'size', 'attempt', 'node', 'refused', 'uncredited', 'copy', 'leased_ms', 'letter', 'lane', 'entry' }, {}, 0
  for _, t in ipairs(tasks) do
    for _, id in ipairs(t.ids) do ids[#ids + 1] = id end
    -- A value of another type is a defect: whoever pushes again hears of it.
    local is_read, values = pcall(call, 'HMGET', K.task(P, t.id), unpack(names))
    for i, value in ipairs(is_read and values or {}) do t.fields[names[i]] = value or nil end
    t.is_taken = is_as_judged(t)
  end
  local owners = call_many({ 'HMGET', K.owners(P) }, ids)
  for _, t in ipairs(tasks) do
    for _ = 1, #t.ids do
      at = at + 1
      if owners[at] then t.is_taken = false end
    end
  end
end

local function own_all(P, tasks)
  local owned = {}
  for _, t in ipairs(tasks) do
    for i, id in ipairs(t.is_taken and t.ids or {}) do owned[#owned + 1], owned[#owned + 2] = id, t.places[i] or whose(t, i) end
  end
  call_many({ 'HSET', K.owners(P) }, owned)
end

-- All of a task comes, and is settled: what `commit` and `settle` do of it, without what the one would write for the other to remove.
local function take_whole(P, t, tombstone_ms)
  local f, n = t.fields, #t.ids
  count(P, 'ingested', n)
  count_tools(P, t)
  if CALL.has_pack then CALL.held = CALL.held + n end
  credit_node(P, t.node, #t.names, n)
  note_pace(P, f, node_of(P, t.node), t.node)
  leave_lease(P, t.id, t.node, t.attempt, 'group_closed', t.node)
  gather('ZREM', K.open(P), t.id)
  local verdicts = settle_groups(P, t.id, t.groups, f)
  note_all(P, t.id, { push_entry(t, 'ACCEPTED', '', t.who, t.traces), trace_entry('l', t.attempt, 'completed'), unpack(verdicts) })
  entomb(P, t.id, tombstone_ms, 'whole', t.who, 'left', 0, 'why', '')
end

-- commit_whole: tombstone ttl ms, mark, pack and sizes of payloads, each as of `commit`, the switch of plug-ins that judged, then per task: task, attempt,
-- node, calls of tools and those that failed, who, traces, number of groups, and of each what `settle` takes. A task is taken and settled,
-- or left as it is where anything is otherwise than its groups were judged for; then its payloads end some day, and it is to be committed. Returns the
-- position, and '1' or '' of each task, or what is wrong with what is stored of it.
SIGNATURE.commit_whole = {}
local WHOLE = { 'tombstone_ms', 'mark', 'packed', 'switch',
  each = { 'id', 'attempt', 'node', 'tools', 'who', 'traces', 'n', each = SIGNATURE.settle.each } }
function SIGNATURE.commit_whole.read(values)
  local a = by_name(WHOLE, values)
  a.pushes = a.each
  for _, t in ipairs(a.pushes) do
    t.groups, t.fields, t.names, t.ids, t.places = t.each, {}, {}, {}, {}
    local calls, errors = string.match(t.tools, '^(%d+),(%d+)$')
    t.tool_calls, t.tool_errors = tonumber(calls), tonumber(errors)
    for episode in string.gmatch(t.who, '%d+\t([^\t\n]+)[^\n]*') do t.names[#t.names + 1] = episode end
    for id in string.gmatch(t.traces, '([^\t\n]+)[^\n]*') do t.ids[#t.ids + 1] = id end
    t.each = #t.ids / #t.names
  end
  return a
end
SIGNATURE.commit_whole.without_run = SIGNATURE.commit.without_run
function F.commit_whole(keys, a)
  local P, tasks, answers = keys[1], a.pushes, {}
  local run = run_of(P)
  CALL.nodes = {}
  place_all(P, tasks, a.packed)
  CALL.wrote_all = a.mark ~= '' and call('UNLINK', K.written(P, a.mark)) == 1
  if run.state == 'active' and (run.switch or '0') == a.switch and (CALL.wrote_all or CALL.has_pack) then read_judged(P, tasks) end
  own_all(P, tasks)
  for i, t in ipairs(tasks) do
    answers[i] = t.is_taken and '1' or ''
    if t.is_taken then
      local ok, problem = pcall(take_whole, P, t, tonumber(a.tombstone_ms))
      if not ok then answers[i] = type(problem) == 'table' and problem.err or tostring(problem) end
    elseif CALL.wrote_all then
      for k, id in ipairs(t.ids) do call('EXPIRE', K.payload(P, whose(t, k), id), UNCOMMITTED_S) end
    end
  end
  PACKS.hold_rest(P)
  write_judged(P)
  local at = position(P, CALL.moved)
  write_nodes(P)
  return { at, answers }
end

-- quarantine: task, member, episode, node, reason, detail, number of trajectories, sample, attempt. Idempotent per episode id.
-- An episode that was accepted or refused before keeps its first answer. Returns { outcome, detail, position }.
SIGNATURE.quarantine = { 'task', 'member', 'episode', 'node', 'reason', 'detail', 'num_trajectories', 'sample', 'attempt' }
function F.quarantine(keys, a)
  local P, task, episode = keys[1], a.task, a.episode
  local names, f = { 'state', 'whole', 'm' .. a.member, 'r' .. episode }, {}
  for i, value in ipairs(call('HMGET', K.task(P, task), unpack(names))) do f[names[i]] = value or nil end
  read_whole(f)
  local member, refused = f['m' .. a.member], f['r' .. episode]
  if member and string.sub(member, 2) == episode then return { 'DUPLICATE', '', position(P, false) } end
  if refused then
    local outcome, detail = string.match(refused, '^(%S+) (.*)$')
    return { outcome, detail, position(P, false) }
  end
  count(P, 'ingested', tonumber(a.num_trajectories))
  count(P, 'dropped:poison', tonumber(a.num_trajectories))
  if f.state then
    call('HSET', K.task(P, task), 'r' .. episode, 'POISON ' .. a.reason, 'refused', 1)
    note_all(P, task, { push_entry(a, 'POISON', a.reason, a.member .. '\t' .. episode, '') })
  end
  note_poison(P, a.node)
  call('XADD', K.poison(P), 'MAXLEN', '~', MAX.poison, '*', 'task', task, 'episode', episode, 'node', a.node,
    'reason', a.reason, 'detail', a.detail, 'sample', a.sample)
  return { 'POISON', a.reason, position(P, true) }
end

end
