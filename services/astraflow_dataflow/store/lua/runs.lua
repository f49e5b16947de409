-- Runs, nodes, evaluations, and states of plug-ins.

-- create_run: run id, identity, recipe, what its author wrote, code, store, most attempts, poison of a node and leases, '1' when tasks may have copies, 'any' or 'all', steps of a turn or 0, trained roles as lines of name and policy,
-- what is archived (see archive.lua) or '', then per policy: name, '1' when it is not trained, '1' when it has no versions, window, floor, smoothing, max staleness, groups per step, steps, replay or '', barrier.
-- Returns 1 when it is new; a run that is there stays as it is.
SIGNATURE.create_run = { 'run', 'identity', 'recipe', 'written', 'code', 'store', 'max_attempts', 'max_poison', 'max_leases', 'copies', 'admit', 'alternate', 'roles', 'archive', each = { 'policy', 'frozen', 'external', 'window', 'floor', 'smoothing', 'max_staleness', 'groups_per_step', 'steps', 'replay', 'barrier' } }
function F.create_run(keys, a)
  local P = keys[1]
  local state = run_of(P).state
  if state == 'deleting' then
    return refuse('PRECONDITION', 'run ' .. a.run .. ' is being deleted; create it again in a moment, or under another id')
  end
  if state then return 0 end
  local now = now_ms()
  call('HSET', K.run(P), 'identity', a.identity, 'recipe', a.recipe, 'written', a.written, 'code', a.code, 'store', a.store, 'max_attempts', a.max_attempts, 'max_poison', a.max_poison, 'max_leases', a.max_leases, 'copies', a.copies,
    'admit', a.admit, 'alternate', a.alternate, 'roles', a.roles, 'archive', a.archive, 'state', 'active', 'create_ms', now, 'cursor', 0, 'exhausted', '0')
  for _, item in ipairs(a.each) do
    call('RPUSH', K.policies(P), item.policy)
    call('HSET', K.policy(P, item.policy), 'frozen', item.frozen, 'external', item.external, 'window', item.window, 'floor', item.floor, 'smoothing', item.smoothing,
      'max_staleness', item.max_staleness, 'groups_per_step', item.groups_per_step, 'steps', item.steps, 'replay', item.replay, 'barrier', item.barrier, 'acceptance', '1', 'epoch', 0, 'finished', 0, 'durable', 0)
  end
  call('XGROUP', 'CREATE', K.lane(P, TRAIN), GROUP, '0', 'MKSTREAM')
  emit(P, 'run')
  return 1
end

-- switch_plugins: recipe, what is archived with it, what it changes (lines), who asked. Asked for again, the newest changes nothing. Returns its number.
SIGNATURE.switch_plugins = { 'recipe', 'archive', 'changes', 'by' }
function F.switch_plugins(keys, a)
  local P = keys[1]
  local newest = tonumber(call('HGET', K.run(P), 'switches') or 0)
  if newest > 0 and call('HGET', K.switch(P, newest), 'recipe') == a.recipe then return newest end
  if newest == 256 then
    return refuse('PRECONDITION', 'plug-ins were switched ' .. newest .. ' times, which is as often as a run keeps; fork the run, or create another')
  end
  call('HSET', K.switch(P, newest + 1), 'recipe', a.recipe, 'archive', a.archive, 'changes', a.changes, 'by', a.by, 'ms', now_ms())
  call('HSET', K.run(P), 'switches', newest + 1)
  if call('ZCARD', K.batch_leases(P)) == 0 then switch_plugins(P) end
  return newest + 1
end

local LIFE = { active = 1, finishing = 2, finished = 3 }

-- advance: state. Moves a run on in its life: forward, or back to active, which continues it; what it has behind it changes nothing.
-- Only a run that is finishing becomes finished, so that a server that saw it finishing cannot end one that was continued meanwhile.
-- `stopped_for` is why the server ends it early, or ''. Returns the state it is in now.
SIGNATURE.advance = { 'state', 'stopped_for' }
function F.advance(keys, a)
  local P = keys[1]
  local state = run_of(P).state
  if not state then return refuse('NOTFOUND', 'no such run') end
  if a.state == 'finished' and state == 'active' then return state end
  if a.state ~= 'active' and LIFE[a.state] < LIFE[state] then return state end
  if a.state ~= state then
    set_state(P, a.state)
    if a.stopped_for ~= '' then call('HSET', K.run(P), 'stopped_for', a.stopped_for) end
    if a.state == 'active' then
      call('HDEL', K.run(P), 'stopped_for')
      for _, purpose in ipairs({ 'training', 'evaluation' }) do note_completed(P, purpose) end
      -- Each policy's trainer says anew how far it goes, so that the first to get there does not end the others.
      for _, policy in ipairs(policies(P)) do
        note_completed(P, 'steps:' .. policy)
        call('HDEL', K.policy(P, policy), 'last_step', 'failed_batches')
      end
    end
    emit(P, 'run')
    emit(P, 'work')
  end
  return a.state
end

-- seal_key: a key. Keeps it as the run's unless the run has one. Returns the run's.
SIGNATURE.seal_key = { 'key' }
function F.seal_key(keys, a)
  call('HSETNX', K.run(keys[1]), 'seal_key', a.key)
  return call('HGET', K.run(keys[1]), 'seal_key')
end

-- Number and lineage of a node's session, which it keeps as `NUMBER LINEAGE`; nil for none. Earlier releases kept no lineage, and took any number.
local function session_of(text)
  local number, lineage = string.match(text or '', '^(%d+) ?(.*)$')
  if not number then return nil, '' end
  return tonumber(number) < 2^53 and tonumber(number) or 0, lineage
end

-- Makes room for another name: of the nodes that a run knows, those go that hold no lease and have been silent longest. Returns whether there is room. Pools
-- call their nodes by ever new names, and so may whoever was granted a pattern of them.
local function make_room(P, now)
  local names, silent = call('SMEMBERS', K.nodes(P)), {}
  if #names < MAX.nodes then return true end
  for _, name in ipairs(names) do
    local f = call('HMGET', K.node(P, name), 'connected_until', 'seen_ms')
    local until_ms = math.max(tonumber(f[1] or 0), tonumber(f[2] or 0) + MAX.joining_ms)
    if until_ms < now and call('EXISTS', K.node_leases(P, name)) == 0 then silent[#silent + 1] = { until_ms, name } end
  end
  table.sort(silent, function(one, other) return one[1] < other[1] end)
  for i = 1, math.min(#silent, MAX.forgotten) do
    call('SREM', K.nodes(P), silent[i][2])
    call('DEL', K.node(P, silent[i][2]))
  end
  return #silent > 0
end

-- join: node, number that the process was given or 0 for a new one, number and lineage of the credential that it showed or 0 and '', a lineage for somebody
-- new, region, pool, most tasks, engines, hardware, price of an hour or ''. Only who shows a credential of the same lineage takes a name over from a session
-- that is live: that has spoken since it joined, and not been silent since. Returns { number, lineage, leases taken back, '1' when there are more to take back:
-- call it again as that session }. In between the node is known as the new process already, and `left_behind` says that what it holds is the old one's.
SIGNATURE.join = { 'node', 'given', 'shown', 'lineage', 'fresh', 'region', 'pool', 'max_tasks', 'engines', 'hardware', 'price' }
function F.join(keys, a)
  local P, N = keys[1], K.node(keys[1], a.node)
  local now, taken, given = now_ms(), {}, tonumber(a.given)
  local f = call('HMGET', N, 'incarnation', 'connected_until')
  local known, owner = session_of(f[1])
  local is_own, live_ms = a.lineage ~= '' and owner == a.lineage, tonumber(f[2] or 0) - now
  if given > 0 and known and (known > given or known == given and not is_own) then
    return refuse('FENCED', 'node ' .. a.node .. ' has joined again since, as number ' .. known .. '; another process uses its name', 'reason=session_ended')
  end
  if known and not is_own and live_ms > 0 then
    return refuse('PRECONDITION', 'node ' .. a.node .. ' is at work, and whoever joins now does not show the credential of its session; choose another --node-id, or wait until it has been silent for ' ..
      math.ceil(live_ms / 1000) .. ' s more (a node that restarts shows what it kept in its work folder)', 'reason=name_in_use')
  end
  if not known and not make_room(P, now) then
    return refuse('PRECONDITION', 'the run knows ' .. MAX.nodes .. ' nodes, and all of them joined just now, are connected or hold leases; stop some, or give them the names of others', 'reason=too_many_nodes')
  end
  local number = given > 0 and given or math.max(known or 0, tonumber(a.shown)) + 1
  local lineage = a.lineage ~= '' and a.lineage or a.fresh
  if known and (given == 0 or not is_own) then
    call('HINCRBY', N, 'restarts', 1)
    call('HSET', N, 'left_behind', '1')
  end
  if call('HEXISTS', N, 'left_behind') == 1 then
    -- Its process is gone, so its leases need not run out first.
    taken = call('SRANDMEMBER', K.node_leases(P, a.node), MAX.given_back)
    for _, task in ipairs(taken) do
      give_again(P, task, 'node_restarted', 'node ' .. a.node .. ' came back with a new incarnation', now, now, a.node)
    end
    if #taken < MAX.given_back then call('HDEL', N, 'left_behind') end
  end
  if known ~= number or not is_own then
    -- A new process may well send the same poison.
    if call('HGET', N, 'drain') ~= 'poison' then call('HDEL', N, 'drain') end
    call('HSET', N, 'join_ms', now)
    history.event(P, 'node_joined', a.node, (known and 'came back' or 'new') .. (a.pool ~= '' and ', pool ' .. a.pool or '') .. (a.region ~= '' and ', region ' .. a.region or ''))
    call('HDEL', N, 'task_ms', 'follow_ms', 'connected_until')
  end
  call('SADD', K.nodes(P), a.node)
  call('HSET', N, 'incarnation', string.format('%.0f %s', number, lineage), 'region', a.region, 'pool', a.pool, 'max_tasks', a.max_tasks, 'engines', a.engines, 'seen_ms', now,
    'hardware', a.hardware, 'price', a.price)
  emit(P, 'work')
  return { number, lineage, #taken, #taken == MAX.given_back and '1' or '0' }
end

-- report: node, its session, connected until (ms from now, 0 when it left), '1' when the node itself was heard, then field, value.
-- Refuses a session that another one ended. Returns { state of the run, why the node must leave or '' }.
SIGNATURE.report = { 'node', 'session', 'connected_ms', 'heard', each = { 'field', 'value' } }
function F.report(keys, a)
  local P, N = keys[1], K.node(keys[1], a.node)
  local f = call('HMGET', N, 'incarnation', 'drain')
  if f[1] ~= a.session then
    local known, number = session_of(f[1]), session_of(a.session)
    if not known or known < number then
      return refuse('LOST', 'Redis has lost that node ' .. a.node .. ' joined as number ' .. number .. '; join again')
    end
    return refuse('FENCED', 'node ' .. a.node .. ' has joined again since, as number ' .. known .. ', not ' .. number .. '; another process uses its name', 'reason=session_ended')
  end
  local now = now_ms()
  local told = { 'connected_until', now + tonumber(a.connected_ms) }
  if a.heard == '1' then told[3], told[4] = 'seen_ms', now end
  for _, item in ipairs(a.each) do
    if item.field == 'engine_restarts' and tonumber(item.value) > tonumber(call('HGET', N, item.field) or 0) then
      history.event(P, 'engine_restarted', a.node, 'for the ' .. item.value .. '. time')
    end
    told[#told + 1] = item.field
    told[#told + 1] = item.value
  end
  call('HSET', N, unpack(told))
  return { run_of(P).state, f[2] or '' }
end

-- note_refused: node, then reason and number of episodes that it pushed and that were not its own to push.
SIGNATURE.note_refused = { 'node', each = { 'reason', 'number' } }
function F.note_refused(keys, a)
  local N = K.node(keys[1], a.node)
  if call('EXISTS', N) == 0 then return end
  for _, item in ipairs(a.each) do
    call('HINCRBY', N, 'refused', item.number)
    call('HSET', N, 'refused_for', item.reason, 'refused_ms', now_ms())
  end
end

-- nodes: nodes. Returns { leases held, fields } of each.
SIGNATURE.nodes = { rest = true }
function F.nodes(keys, a)
  local P, found = keys[1], {}
  for i, node in ipairs(a.rest) do found[i] = { call('SCARD', K.node_leases(P, node)), call('HGETALL', K.node(P, node)) } end
  return found
end

local KEPT_JOURNALS = 16
local MAX_WAITING = 8

-- Opens a pass at `wanted`, lines of policy and version: it has a lane of its own, and nodes get nothing newer while it is open.
local function open_evaluation(P, id, wanted, now)
  call('HSET', K.evaluation(P, id), 'versions', lines(wanted), 'state', 'open')
  call('ZADD', K.evaluations(P), now, id)
  for _, old in ipairs(call('ZREVRANGE', K.evaluations(P), KEPT_JOURNALS, KEPT_JOURNALS)) do call('UNLINK', K.evaluation_journal(P, old)) end
  call('HSET', K.open_evaluations(P), id, lines(wanted))
  call('HSET', K.run(P), 'begun_evaluation', id)
  call('XGROUP', 'CREATE', K.lane(P, id), GROUP, '0', 'MKSTREAM')
  emit(P, 'work')
end

-- plan_evaluation: id, planned, samples per task, '1' final, then policy, version. Idempotent. Refuses versions that are not the newest, so that nodes, which
-- get no newer ones while a pass is open, all come to serve these; and a periodic pass beside another. Returns 1 when it is new.
SIGNATURE.plan_evaluation = { 'id', 'planned', 'samples_per_task', 'final', each = { 'policy', 'version' } }
function F.plan_evaluation(keys, a)
  local P, E, wanted = keys[1], K.evaluation(keys[1], a.id), {}
  if call('EXISTS', E) == 1 then return 0 end
  if a.final ~= '1' and call('HLEN', K.open_evaluations(P)) > 0 then return 0 end
  for _, item in ipairs(a.each) do
    if call('HGET', K.policy(P, item.policy), 'version') ~= item.version then return 0 end
    wanted[#wanted + 1] = item.policy .. ' ' .. item.version
  end
  local now = now_ms()
  call('HSET', E, 'planned', a.planned, 'samples_per_task', a.samples_per_task, 'final', a.final, 'fed', 0, 'done', 0, 'failed', 0, 'create_ms', now)
  call('HSET', K.run(P), 'planned_evaluation', a.id)
  open_evaluation(P, a.id, wanted, now)
  return 1
end

-- passes. Returns { id, begin or request time, fields } of the evaluations on which it depends what is evaluated next: those that are open or wait,
-- the one begun last, and the one planned last, whose versions are the newest of those planned.
function F.passes(keys)
  local P, found, seen = keys[1], {}, {}
  local function add(id)
    if not id or seen[id] then return end
    seen[id] = true
    found[#found + 1] = { id, call('ZSCORE', K.evaluations(P), id), call('HGETALL', K.evaluation(P, id)) }
  end
  for _, id in ipairs(call('HKEYS', K.open_evaluations(P))) do add(id) end
  for _, id in ipairs(call('HKEYS', K.waiting_evaluations(P))) do add(id) end
  local f = call('HMGET', K.run(P), 'begun_evaluation', 'planned_evaluation')
  add(f[1])
  add(f[2])
  return found
end

-- request_evaluation: id, digest of the request, planned, samples per task, number of versions named, then policy and version of each, then
-- own tasks. Idempotent by id and digest. Returns 1 when it is new.
SIGNATURE.request_evaluation = { 'id', 'digest', 'planned', 'samples_per_task', 'num_versions', rest = true }
function F.request_evaluation(keys, a)
  local P, E, named_versions, own = keys[1], K.evaluation(keys[1], a.id), {}, 2 * tonumber(a.num_versions)
  local known = call('HGET', E, 'digest')
  if known == a.digest then return 0 end
  if call('EXISTS', E) == 1 then return refuse('CONFLICT', 'evaluation ' .. a.id .. ' was another request; give this one another name') end
  if run_of(P).state ~= 'active' then
    return refuse('PRECONDITION', 'the run has ended, and its nodes leave; continue it first: astraflow runs resume')
  end
  if call('HLEN', K.waiting_evaluations(P)) >= MAX_WAITING then
    return refuse('PRECONDITION', MAX_WAITING .. ' evaluations wait, the most there may be; ask again later, or cancel some')
  end
  for i = 1, own, 2 do
    local newest = call('HGET', K.policy(P, a.rest[i]), 'version')
    if newest ~= a.rest[i + 1] then
      return refuse('PRECONDITION', 'version ' .. a.rest[i + 1] .. ' of ' .. a.rest[i] .. ' is not its newest announced one, ' .. (newest or 'which there is not yet') ..
        '; nodes only go forward, so ask for that one, or leave it out; `astraflow eval` scores older ones by itself')
    end
    named_versions[#named_versions + 1] = a.rest[i] .. ' ' .. newest
  end
  local now = now_ms()
  call('HSET', E, 'digest', a.digest, 'versions', lines(named_versions), 'planned', a.planned, 'samples_per_task', a.samples_per_task, 'final', '0',
    'requested', '1', 'own_tasks', #a.rest - own, 'state', 'waiting', 'fed', 0, 'done', 0, 'failed', 0, 'create_ms', now)
  for i = own + 1, #a.rest do call('RPUSH', K.evaluation_tasks(P, a.id), a.rest[i]) end
  call('ZADD', K.evaluations(P), now, a.id)
  call('HSET', K.waiting_evaluations(P), a.id, lines(named_versions))
  emit(P, 'run')
  return 1
end

-- Of each policy the lowest version that a waiting request names.
local function named_by_waiting(P)
  local lowest, waiting = {}, call('HVALS', K.waiting_evaluations(P))
  for _, line in ipairs(split(lines(waiting))) do
    local policy, version = string.match(line, '^(%S+) (%d+)$')
    lowest[policy] = math.min(tonumber(version), lowest[policy] or math.huge)
  end
  return lowest
end

-- open_requested: id, then the trained policies. Opens a pass that waits, at the versions that it names and of the other policies at the newest
-- that nodes may get now. Returns 1, or 0 beside an open one, or when a policy has no version.
SIGNATURE.open_requested = { 'id', rest = true }
function F.open_requested(keys, a)
  local P, wanted, asked = keys[1], {}, {}
  local named_versions = call('HGET', K.waiting_evaluations(P), a.id)
  if not named_versions or call('HLEN', K.open_evaluations(P)) > 0 then return 0 end
  for policy, version in string.gmatch(named_versions, '(%S+) (%d+)') do asked[policy] = tonumber(version) end
  local lowest = named_by_waiting(P)
  for _, policy in ipairs(a.rest) do
    local newest = call('HGET', K.policy(P, policy), 'version')
    if not newest then return 0 end
    wanted[#wanted + 1] = policy .. ' ' .. (asked[policy] or math.min(tonumber(newest), lowest[policy] or math.huge))
  end
  call('HDEL', K.waiting_evaluations(P), a.id)
  open_evaluation(P, a.id, wanted, now_ms())
  return 1
end

-- feed_evaluation: id, expected fed, planned (smaller when the data set ended), lines for the journal, then tasks as of `submit`. Returns -1 when another server was first.
SIGNATURE.feed_evaluation = { 'evaluation', 'expected', 'planned', 'journal', each = SIGNATURE.submit.each }
function F.feed_evaluation(keys, a)
  local P, E = keys[1], K.evaluation(keys[1], a.evaluation)
  local f = call('HMGET', E, 'fed', 'state')
  if f[1] ~= a.expected or f[2] ~= 'open' then return -1 end
  local fresh = 0
  for _, item in ipairs(a.each) do
    if add_task(P, a.evaluation, item) then fresh = fresh + 1 end
  end
  call('HSET', E, 'fed', tonumber(a.expected) + #a.each, 'planned', a.planned)
  if a.journal ~= '' then call('APPEND', K.evaluation_journal(P, a.evaluation), a.journal) end
  finish_evaluation(P, a.evaluation)
  emit(P, 'work')
  return fresh
end

-- give_up_evaluation: id, reason, state that it ends in. Closes its tasks; what was counted stays counted. Returns the tasks closed.
SIGNATURE.give_up_evaluation = { 'id', 'reason', 'state' }
function F.give_up_evaluation(keys, a)
  local P, E, now = keys[1], K.evaluation(keys[1], a.id), now_ms()
  local state = call('HGET', E, 'state')
  if state ~= 'open' and state ~= 'waiting' then return 0 end
  call('HSET', E, 'state', a.state, 'reason', a.reason, 'complete_ms', now)
  call('HDEL', K.open_evaluations(P), a.id)
  call('HDEL', K.waiting_evaluations(P), a.id)
  local closed = 0
  for _, entry in ipairs(call('XRANGE', K.lane(P, a.id), '-', '+')) do
    if close_task(P, entry[2][2], 'given_up', now) then closed = closed + 1 end
  end
  call('UNLINK', K.lane(P, a.id), K.retry(P, a.id), K.evaluation_tasks(P, a.id))
  release_versions(P, a.id)
  return closed
end

-- States of plug-ins are a hash per plug-in, and one of revisions. A save names the revision it was made from, so of two servers that
-- changed one state the second reads it again.
-- save_states: then per plug-in: name, revision it was read at, number of entries, and per entry key and value ('' deletes it).
-- Returns 1, or 0 and changes nothing when a revision is another by now.
function F.save_states(keys, a)
  local P, i = keys[1], 1
  while i <= #a do
    if (call('HGET', K.plugin_revisions(P), a[i]) or '0') ~= a[i + 1] then return 0 end
    i = i + 3 + 2 * tonumber(a[i + 2])
  end
  i = 1
  while i <= #a do
    local state, after = K.plugin_state(P, a[i]), i + 3 + 2 * tonumber(a[i + 2])
    call('HINCRBY', K.plugin_revisions(P), a[i], 1)
    for at = i + 3, after - 1, 2 do
      if a[at + 1] == '' then call('HDEL', state, a[at]) else call('HSET', state, a[at], a[at + 1]) end
    end
    i = after
  end
  return 1
end

-- Who works on a run now, or nil. A trainer does until it releases its policy or has not called for a lease time.
local function at_work(P, lease_ms)
  local now = now_ms()
  for _, node in ipairs(call('SMEMBERS', K.nodes(P))) do
    if tonumber(call('HGET', K.node(P, node), 'connected_until') or 0) > now then return 'node ' .. node .. ' is connected' end
  end
  if call('ZCOUNT', K.leases(P), now, '+inf') > 0 then return 'leases are running' end
  for _, policy in ipairs(policies(P)) do
    local waiting = tonumber(call('HGET', K.policy(P, policy), 'wait_until') or 0)
    if waiting > now then return 'the trainer of ' .. policy .. ' waits for a batch' end
  end
  if call('ZCOUNT', K.batch_leases(P), now, '+inf') > 0 then return 'a trainer holds a batch' end
  for _, policy in ipairs(policies(P)) do
    local f = call('HMGET', K.policy(P, policy), 'trainer', 'heard_ms')
    local heard = tonumber(f[2] or '')
    if heard and heard + lease_ms > now then
      return 'trainer ' .. f[1] .. ' of ' .. policy .. ' called ' .. math.floor((now - heard) / 1000) .. ' s ago'
    end
  end
  return nil
end

-- begin_delete: run id, '1' force, lease ms of a trainer. Ends the run for everybody; its keys are removed afterwards, then end_delete. Returns the counters.
SIGNATURE.begin_delete = { 'run', 'force', 'lease_ms' }
function F.begin_delete(keys, a)
  local P = keys[1]
  local state = run_of(P).state
  if not state then return refuse('NOTFOUND', 'no run ' .. a.run .. ' on this server; ListRuns shows those it has') end
  if state ~= 'deleting' then
    local busy = a.force ~= '1' and state ~= 'finished' and at_work(P, tonumber(a.lease_ms))
    if busy then
      return refuse('PRECONDITION', 'run ' .. a.run .. ' is ' .. state .. ' and ' .. busy .. '; finish it first, or delete it with force')
    end
    for _, place in ipairs({ 'assembling', 'ready', 'in_batch' }) do
      local n = tonumber(call('HGET', K.counters(P), place) or '') or 0
      count(P, place, -n)
      count(P, 'dropped:run_deleted', n)
    end
    emit(P, 'run')
    set_state(P, 'deleting')
    write_gathered(P)
  end
  return call('HGETALL', K.counters(P))
end

-- What is left of a run until its deletion ends: that it is being deleted, and which packs were to be removed outside first.
local function last_keys(P)
  return { K.run(P), K.counters(P), K.packs(P), K.packs_ending(P), K.packs_ended(P) }
end

-- remove_keys: cursor, '0' at first. Removes some keys of a run that is being deleted, and of another none: it may have been created again meanwhile.
-- The last ones stay. Returns { cursor, '0' at the end, number removed }.
SIGNATURE.remove_keys = { 'cursor' }
function F.remove_keys(keys, a)
  local P, last, removed = keys[1], {}, 0
  if run_of(P).state ~= 'deleting' then return { '0', 0 } end
  for _, name in ipairs(last_keys(P)) do last[name] = true end
  local found = call('SCAN', a.cursor, 'MATCH', P .. '*', 'COUNT', 1000)
  for _, name in ipairs(found[2]) do
    if not last[name] then removed = removed + call('UNLINK', name) end
  end
  return { found[1], removed }
end

-- end_delete. The last keys of a run that is being deleted. Returns how many.
SIGNATURE.end_delete = {}
function F.end_delete(keys)
  if run_of(keys[1]).state ~= 'deleting' then return 0 end
  return call('UNLINK', unpack(last_keys(keys[1])))
end
