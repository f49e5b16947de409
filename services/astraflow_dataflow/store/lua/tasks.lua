-- Tasks: submit, lease, renew, give back, expire. Task states:
-- queued -> leased <-> retry -> complete -> done (training) | done (evaluation), see settle.lua.

local function add_task(P, lane, id, size, evaluation, spec)
  if call('SADD', K.known(P), id) == 0 then return false end
  local entry = call('XADD', K.lane(P, lane), '*', 'task', id)
  call('HSET', K.task(P, id), 'state', 'queued', 'attempt', 0, 'tries', 0, 'size', size, 'left', size,
    'lane', lane, 'entry', entry, 'evaluation', evaluation, 'spec', spec)
  return true
end

-- Removes what points at a running lease; its holder learns of it unless it ended the lease itself. `outcome` is for the trace.
local function end_lease(P, task, reason, quiet_node, outcome)
  local f = call('HMGET', K.task(P, task), 'state', 'node', 'attempt')
  call('ZREM', K.leases(P), task)
  if f[1] ~= 'leased' then return end
  note(P, task, 'l', f[3], outcome)
  call('SREM', K.node_leases(P, f[2]), task)
  if f[2] ~= quiet_node then
    emit(P, 'node ' .. f[2], 'lease', task .. '#' .. f[3], 'reason', reason)
  end
end

local function leave_lane(P, task)
  local f = call('HMGET', K.task(P, task), 'lane', 'entry')
  if f[1] then
    call('XACK', K.lane(P, f[1]), GROUP, f[2])
    call('XDEL', K.lane(P, f[1]), f[2])
    call('ZREM', K.retry(P, f[1]), task)
  end
  call('ZREM', K.open(P), task)
end

-- Leaves what repeated pushes need (members, refusals) and lets even that end some day.
local function entomb(P, task, ttl_ms)
  call('HSET', K.task(P, task), 'state', 'done')
  call('HDEL', K.task(P, task), 'spec', 'lane', 'entry', 'credited', 'uncredited', 'avoid')
  call('UNLINK', K.members(P, task))
  call('PEXPIRE', K.task(P, task), ttl_ms)
  close_trace(P, task, ttl_ms)
end

-- Nodes may get the versions that a pass held back.
local function release_versions(P, id)
  for _, line in ipairs(split(call('HGET', K.evaluation(P, id), 'versions'))) do emit(P, 'version ' .. string.match(line, '^%S+')) end
  emit(P, 'work')
end

local function finish_evaluation(P, id)
  local E = K.evaluation(P, id)
  local f = call('HMGET', E, 'planned', 'done', 'failed', 'state')
  if f[4] == 'open' and tonumber(f[2]) + tonumber(f[3]) >= tonumber(f[1]) then
    call('HSET', E, 'state', 'complete', 'complete_ms', now_ms())
    call('HDEL', K.open_evaluations(P), id)
    call('UNLINK', K.lane(P, id), K.retry(P, id))
    release_versions(P, id)
  end
end

-- Ends a task whose members will not all come. Training tasks go on to settle; evaluation tasks end here.
local function close_task(P, task, why, now, outcome)
  local T = K.task(P, task)
  local f = call('HMGET', T, 'state', 'evaluation', 'left')
  if not is_open(f[1]) then return false end
  end_lease(P, task, 'group_closed', '', outcome or why)
  note(P, task, 'C', why)
  if f[2] ~= '' then
    leave_lane(P, task)
    entomb(P, task, 86400000)
    call('HINCRBY', K.evaluation(P, f[2]), 'failed', 1)
    finish_evaluation(P, f[2])
  else
    call('HSET', T, 'state', 'complete', 'why', why)
    call('ZREM', K.open(P), task)
    call('ZADD', K.settling(P), now, task)
    emit(P, 'work')
  end
  return true
end

local function bury(P, task, reason, detail, now)
  local f = call('HMGET', K.task(P, task), 'attempt', 'node', 'size', 'evaluation', 'spec')
  call('XADD', K.dead(P), 'MAXLEN', '~', MAX_DEAD, '*', 'task', task, 'reason', reason, 'detail', detail,
    'attempt', f[1], 'node', f[2] or '', 'size', f[3], 'evaluation', f[4], 'spec', f[5])
  close_task(P, task, 'dead_letter', now, reason)
end

-- Another node gets the task, or nobody when its tries are spent. Returns true when it will be leased again.
local function give_again(P, task, reason, detail, now, due, quiet_node)
  local T = K.task(P, task)
  local f = call('HMGET', T, 'tries', 'lane')
  if tonumber(f[1]) >= tonumber(call('HGET', K.run(P), 'max_attempts')) then
    bury(P, task, reason, detail, now)
    return false
  end
  end_lease(P, task, 'lease_lost', quiet_node, reason)
  call('HSET', T, 'state', 'retry')
  call('ZADD', K.retry(P, f[2]), due, task)
  emit(P, 'work')
  return true
end

-- submit: lane, then id, size, spec per task. Returns the number of new tasks.
SIGNATURE.submit = { 'lane', each = { 'id', 'size', 'spec' } }
local function submit(keys, a)
  local P, fresh = keys[1], 0
  if call('HGET', K.run(P), 'state') ~= 'active' then
    return refuse('PRECONDITION', 'the run takes no tasks any more; create a new run')
  end
  for _, item in ipairs(a.each) do
    if add_task(P, a.lane, item.id, tonumber(item.size), '', item.spec) then fresh = fresh + 1 end
  end
  if fresh > 0 then emit(P, 'work') end
  return fresh
end

-- feed: expected cursor, next cursor, '1' when the data set ended, then id, size, spec per task.
-- Compare-and-set on the cursor: of two servers feeding at once one does nothing. Returns -1 for that one.
SIGNATURE.feed = { 'expected', 'next', 'exhausted', each = { 'id', 'size', 'spec' } }
local function feed(keys, a)
  local P = keys[1]
  local f = call('HMGET', K.run(P), 'cursor', 'state')
  if f[1] ~= a.expected or f[2] ~= 'active' then return -1 end
  call('HSET', K.run(P), 'cursor', a.next, 'exhausted', a.exhausted)
  local fresh = 0
  for _, item in ipairs(a.each) do
    if add_task(P, TRAIN, item.id, tonumber(item.size), '', item.spec) then fresh = fresh + 1 end
  end
  if fresh > 0 then emit(P, 'work') end
  return fresh
end

-- Groups that may still be leased for a policy: equation 5.1 of the protocol solved for new groups. A node that serves `lag` versions
-- less than the newest samples with weights that are that much older already: its window is that many steps shorter. Of policies that take
-- turns one has room, and only for the steps that are left of its turn.
local function free_credit(P, policy, lag)
  local whose, last = turn(P)
  if whose and whose ~= policy then return 0 end
  local f = call('HMGET', K.policy(P, policy), 'window', 'floor', 'acceptance', 'max_staleness', 'finished', 'groups_per_step')
  local survives = math.max(tonumber(f[3]), tonumber(f[2]))
  local unpublished, bound, of_step = 0, 0, call('HGETALL', K.unpublished(P, policy))
  for i = 1, #of_step, 2 do
    local n = tonumber(of_step[i + 1])
    unpublished = unpublished + n
    if tonumber(of_step[i]) > tonumber(f[5]) then bound = bound + n end
  end
  local window = tonumber(f[1]) * (1 - lag / (tonumber(f[4]) + 1))
  local ready = call('ZCARD', K.ready(P, policy))
  local room = window - ready - unpublished
  if whose then room = math.min(room, (last - tonumber(f[5])) * tonumber(f[6]) - ready - bound) end
  return math.max(0, math.floor(room / survives - call('SCARD', K.outstanding(P, policy)) + 1e-9))
end

-- Leases a task; `without` are roles that this attempt leaves out, besides those that have no credit.
local function grant(P, node, task, ttl, horizon, now, without)
  local T = K.task(P, task)
  local f = call('HMGET', T, 'size', 'spec', 'uncredited')
  local attempt = call('HINCRBY', T, 'attempt', 1)
  call('HINCRBY', T, 'tries', 1)
  call('HSET', T, 'state', 'leased', 'node', node)
  call('ZADD', K.leases(P), now + ttl, task)
  call('SADD', K.node_leases(P, node), task)
  call('ZADD', K.open(P), 'NX', now + horizon, task)
  open_trace(P, task)
  note(P, task, 'L', attempt, node)
  local names, missing = {}, {}
  for i = 0, tonumber(f[1]) - 1 do names[#names + 1] = 'm' .. i end
  for i, filled in ipairs(call('HMGET', T, unpack(names))) do
    if not filled then missing[#missing + 1] = i - 1 end
  end
  local uncredited = split(f[3])
  for _, role in ipairs(without or {}) do uncredited[#uncredited + 1] = role end
  return { task, attempt, f[2], table.concat(missing, ','), lines(uncredited) }
end

local function avoids(P, task, node)
  local names = call('HGET', K.task(P, task), 'avoid')
  return names and string.find(names, '\n' .. node .. '\n', 1, true) ~= nil
end

-- Versions between the newest announced one and what a node says it serves. A node that says nothing at all has no lag; one that serves other
-- policies, and not this one, has all of it.
local function lag_of(P, policy, serving)
  if next(serving) == nil then return 0 end
  if not serving[policy] then return math.huge end
  return math.max(0, tonumber(call('HGET', K.policy(P, policy), 'version') or 0) - serving[policy])
end

-- Roles that were charged for a task and that this node cannot play now; nil when it must leave the task to others. It waits for a node that
-- plays all of them before one gets it that plays some.
local function unplayable(P, task, serving, lane, now)
  local left, lacking, policy_of = 0, {}, {}
  for _, role in ipairs(trained_roles(P)) do policy_of[role.name] = role.policy end
  for _, name in ipairs(split(call('HGET', K.task(P, task), 'credited'))) do
    local policy = policy_of[name]
    if lag_of(P, policy, serving) > tonumber(call('HGET', K.policy(P, policy), 'max_staleness')) then lacking[#lacking + 1] = name
    else left = left + 1 end
  end
  if #lacking == 0 then return lacking end
  local waits = now - tonumber(call('ZSCORE', K.retry(P, lane), task)) < RELUCTANCE_MS
  if left == 0 or waits or call('HGET', K.run(P), 'admit') == 'all' then return nil end
  return lacking
end

local function lease_retries(P, node, serving, lane, want, ttl, horizon, now, out)
  local due = call('ZRANGEBYSCORE', K.retry(P, lane), '-inf', now, 'LIMIT', 0, want + 256)
  for _, task in ipairs(due) do
    if #out >= want then return end
    local without = not avoids(P, task, node) and unplayable(P, task, serving, lane, now)
    if without then
      call('ZREM', K.retry(P, lane), task)
      local entry = call('HGET', K.task(P, task), 'entry')
      call('XCLAIM', K.lane(P, lane), GROUP, node, 0, entry, 'JUSTID')
      out[#out + 1] = grant(P, node, task, ttl, horizon, now, without)
    end
  end
end

local function read_lane(P, node, lane, most)
  local reply = call('XREADGROUP', 'GROUP', GROUP, node, 'COUNT', most, 'STREAMS', K.lane(P, lane), '>')
  local found = {}
  if not reply then return found end
  for _, entry in ipairs(reply[1][2]) do
    local task = entry[2][2]
    if is_open(call('HGET', K.task(P, task), 'state')) then
      found[#found + 1] = task
    else
      call('XACK', K.lane(P, lane), GROUP, entry[1])
      call('XDEL', K.lane(P, lane), entry[1])
    end
  end
  return found
end

-- Whether the trainer of a policy has released it: it trains no more, and is not waited for.
local function has_ended(P, policy)
  local f = call('HMGET', K.policy(P, policy), 'epoch', 'heard_ms')
  return f[1] ~= '0' and not f[2]
end

-- Tasks that may be charged with this credit, in groups per policy: under `all` each role needs a group, unless its policy has ended or it is
-- another one's turn; under `any` one is enough.
local function admitted(P, roles, credit)
  local needs, fewest, most, whose = {}, nil, 0, turn(P)
  for _, role in ipairs(roles) do needs[role.policy] = (needs[role.policy] or 0) + 1 end
  for policy, n in pairs(needs) do
    local whole = math.floor(credit[policy] / n)
    if policy == (whose or policy) and not has_ended(P, policy) then fewest = math.min(fewest or whole, whole) end
    most = math.max(most, math.ceil(credit[policy] / n))
  end
  return call('HGET', K.run(P), 'admit') == 'all' and fewest or most
end

-- Charges one group to each role whose policy has credit; trajectories of the others will end as no_credit. Roles take turns to be first, so
-- that of two roles of one policy neither always gets its last group.
local function charge(P, task, roles, credit)
  local credited, uncredited = {}, {}
  local turn = call('HINCRBY', K.run(P), 'charges', 1)
  for i = 1, #roles do
    local role = roles[(turn + i) % #roles + 1]
    if credit[role.policy] > 0 then
      credit[role.policy] = credit[role.policy] - 1
      credited[#credited + 1] = role.name
      call('SADD', K.outstanding(P, role.policy), role.name .. ' ' .. task)
    else
      uncredited[#uncredited + 1] = role.name
    end
  end
  call('HSET', K.task(P, task), 'credited', lines(credited))
  if #uncredited > 0 then call('HSET', K.task(P, task), 'uncredited', lines(uncredited)) end
end

-- Why nobody may train now, or nil.
local function barred(P)
  if call('HGET', K.run(P), 'state') ~= 'active' then return 'run_finished' end
  for _, policy in ipairs(policies(P)) do
    local f = call('HMGET', K.policy(P, policy), 'version', 'external')
    if not f[1] and f[2] ~= '1' then return 'no_version' end
  end
  return nil
end

-- Why a node without credit gets nothing. `serving` maps policy to the version the node says it serves.
local function no_room(P, serving)
  for _, role in ipairs(trained_roles(P)) do
    local policy = role.policy
    local lag = lag_of(P, policy, serving)
    if lag > tonumber(call('HGET', K.policy(P, policy), 'max_staleness')) and free_credit(P, policy, 0) > 0 then
      return lag == math.huge and 'policy_not_served' or 'node_behind'
    end
  end
  return 'staleness_window'
end

-- Evaluation leases go to nodes that serve exactly the versions; they come before training.
local function lease_evaluations(P, node, serving, want, ttl, horizon, now, out)
  local open = call('HGETALL', K.open_evaluations(P))
  for i = 1, #open, 2 do
    if #out >= want then return end
    local served = true
    for _, line in ipairs(split(open[i + 1])) do
      local policy, version = string.match(line, '^(%S+) (%d+)$')
      served = served and serving[policy] == tonumber(version)
    end
    if served then
      lease_retries(P, node, serving, open[i], want, ttl, horizon, now, out)
      for _, task in ipairs(want > #out and read_lane(P, node, open[i], want - #out) or {}) do
        out[#out + 1] = grant(P, node, task, ttl, horizon, now)
      end
    end
  end
end

-- Returns why nothing more was leased for training, or nil when `want` was reached.
local function lease_training(P, node, serving, want, ttl, horizon, now, out)
  local reason = barred(P)
  if reason then return reason end
  lease_retries(P, node, serving, TRAIN, want, ttl, horizon, now, out)
  local roles, credit = trained_roles(P), {}
  for _, policy in ipairs(policies(P)) do credit[policy] = free_credit(P, policy, lag_of(P, policy, serving)) end
  while #out < want do
    if admitted(P, roles, credit) <= 0 then return no_room(P, serving) end
    local found = read_lane(P, node, TRAIN, 1)
    if #found > 0 then
      charge(P, found[1], roles, credit)
      out[#out + 1] = grant(P, node, found[1], ttl, horizon, now)
    elseif call('XLEN', K.lane(P, TRAIN)) == call('XPENDING', K.lane(P, TRAIN), GROUP)[1] then
      return call('HGET', K.run(P), 'exhausted') == '1' and 'dataset_exhausted' or 'no_tasks'
    end
  end
  return nil
end

-- Whether another node might get something that this one did not ask for or may not have.
local function is_more(P, serving, reason)
  if not reason or reason == 'node_full' or reason == 'node_behind' or reason == 'policy_not_served' then return true end
  if call('HLEN', K.open_evaluations(P)) > 0 or call('ZCARD', K.retry(P, TRAIN)) > 0 then return true end
  if reason ~= 'staleness_window' then return false end
  for _, role in ipairs(trained_roles(P)) do
    if lag_of(P, role.policy, serving) > 0 then return true end
  end
  return false
end

-- lease: node, want, ttl, horizon, most leases the node may hold, session or '', then policy, version served.
-- Returns { reason, leases, '1' when another node might get something }; reason is '' when all that was wanted was leased.
SIGNATURE.lease = { 'node', 'want', 'ttl', 'horizon', 'max_held', 'session', each = { 'policy', 'version' } }
local function lease(keys, a)
  local P, node, want, ttl, horizon = keys[1], a.node, tonumber(a.want), tonumber(a.ttl), tonumber(a.horizon)
  local now, out, serving = now_ms(), {}, {}
  for _, item in ipairs(a.each) do serving[item.policy] = tonumber(item.version) end
  if call('HGET', K.run(P), 'state') == 'finished' then return { 'run_finished', {}, '0' } end
  local f = call('HMGET', K.node(P, node), 'session', 'drain')
  if a.session ~= '' and f[1] ~= a.session then return { 'session_replaced', {}, '1' } end
  if f[2] then return { 'draining', {}, '1' } end
  want = math.min(want, tonumber(a.max_held) - call('SCARD', K.node_leases(P, node)))
  if want <= 0 then return { 'node_full', {}, '1' } end
  lease_evaluations(P, node, serving, want, ttl, horizon, now, out)
  local reason = nil
  if #out < want then reason = lease_training(P, node, serving, want, ttl, horizon, now, out) end
  return { reason or '', out, is_more(P, serving, reason) and '1' or '0' }
end

local function holds(P, node, lease_id)
  local task, attempt = string.match(lease_id, '^(.*)#(%d+)$')
  if not task then return nil end
  local f = call('HMGET', K.task(P, task), 'state', 'attempt', 'node')
  if f[1] == 'leased' and f[2] == attempt and f[3] == node then return task end
  return nil
end

-- renew: node, ttl, lease ids. Returns the leases that are not this node's any more.
SIGNATURE.renew = { 'node', 'ttl', rest = true }
local function renew(keys, a)
  local P, lost, now = keys[1], {}, now_ms()
  for _, id in ipairs(a.rest) do
    local task = holds(P, a.node, id)
    if task then call('ZADD', K.leases(P), now + tonumber(a.ttl), task) else lost[#lost + 1] = id end
  end
  return lost
end

-- Gives back a lease that never arrived; costs no attempt.
local function give_back_undelivered(P, node, task, now)
  call('HINCRBY', K.task(P, task), 'tries', -1)
  give_again(P, task, 'undelivered', 'the lease did not reach the node', now, now, '')
end

-- reconcile: node, ttl, lease ids the node holds. Renews these, gives back what it does not hold. Returns { lost lease ids, given back }.
SIGNATURE.reconcile = { 'node', 'ttl', rest = true }
local function reconcile(keys, a)
  local P, node, now, held, given, lost = keys[1], a.node, now_ms(), {}, 0, {}
  for _, id in ipairs(a.rest) do held[id] = true end
  for _, task in ipairs(call('SMEMBERS', K.node_leases(P, node))) do
    local id = task .. '#' .. call('HGET', K.task(P, task), 'attempt')
    if held[id] then
      call('ZADD', K.leases(P), now + tonumber(a.ttl), task)
      held[id] = nil
    else
      give_back_undelivered(P, node, task, now)
      given = given + 1
    end
  end
  for id in pairs(held) do lost[#lost + 1] = id end
  return { lost, given }
end

-- leave: node, session, leases that it never confirmed. Gives these back. Returns how many.
SIGNATURE.leave = { 'node', 'session', rest = true }
local function leave(keys, a)
  local P, node, now, given = keys[1], a.node, now_ms(), 0
  if call('HGET', K.node(P, node), 'session') == a.session then
    call('HSET', K.node(P, node), 'connected_until', now)
  end
  for _, id in ipairs(a.rest) do
    local task = holds(P, node, id)
    if task then
      give_back_undelivered(P, node, task, now)
      given = given + 1
    end
  end
  return given
end

-- What a task is for, as failures and completions are counted: those of an evaluation do not hide those of training.
local function purpose_of(P, task)
  return call('HGET', K.task(P, task), 'evaluation') ~= '' and 'evaluation' or 'training'
end

-- A task came to its end with all that it needs: failures after this one begin a new row.
local function note_completed(P, purpose)
  call('HINCRBY', K.failures(P), 'completed ' .. purpose, 1)
end

-- Counts a failure under what it has in common with others (`kind`), and keeps the first of each kind. In a row are those
-- without a completed task of the same purpose between them.
local function note_failure(P, task, node, kind, reason, detail, now)
  local F, purpose = K.failures(P), purpose_of(P, task)
  if call('HEXISTS', F, 'first ' .. kind) == 0 then
    if call('HINCRBY', F, 'kinds', 1) > MAX_FAILURE_KINDS then kind = 'other' end
    call('HSETNX', F, 'first ' .. kind, table.concat({ now, node, task, reason, detail }, '\n'))
  end
  local row, completed = ' ' .. purpose .. ' ' .. kind, call('HGET', F, 'completed ' .. purpose) or '0'
  if call('HGET', F, 'after' .. row) ~= completed then call('HSET', F, 'after' .. row, completed, 'row' .. row, 0) end
  if kind ~= 'other' then call('HINCRBY', F, 'row' .. row, 1) end
  call('HINCRBY', F, 'count ' .. kind, 1)
  call('HSET', F, 'last ' .. kind, now)
end

-- fail: node, lease id, reason, detail, '1' retryable, '1' costs no attempt, backoff ms, kind. Returns 1 when it will be leased again.
SIGNATURE.fail = { 'node', 'lease', 'reason', 'detail', 'retryable', 'free', 'backoff', 'kind' }
local function fail(keys, a)
  local P, node, now = keys[1], a.node, now_ms()
  local task = holds(P, node, a.lease)
  if not task then return 0 end
  local T = K.task(P, task)
  if a.free ~= '1' then note_failure(P, task, node, a.kind, a.reason, a.detail, now) end
  if a.free == '1' then
    call('HINCRBY', T, 'tries', -1)
    if a.reason == 'missing_capability' then
      call('HSET', T, 'avoid', (call('HGET', T, 'avoid') or '\n') .. node .. '\n')
    end
    if a.reason == 'environment_unavailable' then
      call('HSET', K.node(P, node), 'environment_fault', a.detail, 'environment_fault_ms', now)
    end
  elseif a.retryable ~= '1' then
    bury(P, task, a.reason, a.detail, now)
    return 0
  end
  local again = give_again(P, task, a.reason, a.detail, now, now + tonumber(a.backoff), node)
  return again and 1 or 0
end

-- sweep: limit. Expires leases and groups whose time is over. Returns { expired leases, closed groups }.
SIGNATURE.sweep = { 'limit' }
local function sweep(keys, a)
  local P, now, limit = keys[1], now_ms(), tonumber(a.limit)
  local expired = call('ZRANGEBYSCORE', K.leases(P), '-inf', now, 'LIMIT', 0, limit)
  for _, task in ipairs(expired) do give_again(P, task, 'lease_expired', 'not renewed in time', now, now, '') end
  local late = call('ZRANGEBYSCORE', K.open(P), '-inf', now, 'LIMIT', 0, limit)
  for _, task in ipairs(late) do close_task(P, task, 'expired', now) end
  if call('ZCOUNT', K.retry(P, TRAIN), '-inf', now) > 0 then emit(P, 'work') end
  return { #expired, #late }
end

-- close_training: limit. Closes admitted training tasks of a run that finishes. Returns how many were closed.
SIGNATURE.close_training = { 'limit' }
local function close_training(keys, a)
  local P, now, closed = keys[1], now_ms(), 0
  for _, task in ipairs(call('ZRANGE', K.open(P), 0, -1)) do
    if closed >= tonumber(a.limit) then break end
    if call('HGET', K.task(P, task), 'evaluation') == '' then
      end_lease(P, task, 'run_finished', '', 'run_finished')
      if call('HGET', K.task(P, task), 'state') == 'leased' then call('HSET', K.task(P, task), 'state', 'retry') end
      close_task(P, task, 'run_finished', now)
      closed = closed + 1
    end
  end
  return closed
end
